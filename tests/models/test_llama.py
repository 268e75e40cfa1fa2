"""Llama-shaped networks: those of transformers, in every method, from scratch."""

from dataclasses import replace

import pytest
import torch
from small_models import mostly_slow
from worlds import batch_rng, randomized, seeded

from adlm.config.schema import Config, Model, Schedule, Vocabulary
from adlm.errors import UserError
from adlm.methods import method_of
from adlm.models.anchored import AnchoredTransformer
from adlm.models.transformer import Transformer, num_parameters

MODEL = Model(family="llama", hidden=24, heads=6, kv_heads=2, mlp=20, blocks=3, dropout=0.0, rotary_base=500.0)
SYMBOLS = 11


def ids(batch: int = 2, length: int = 9) -> torch.Tensor:
    return torch.randint(SYMBOLS, (batch, length), generator=seeded(1))


@pytest.mark.parametrize("causal", [False, True])
def test_query_heads_that_share_keys_equal_repeated_key_heads(causal):
    shared = randomized(Transformer(MODEL, SYMBOLS, causal, False)).double().eval()
    full = Transformer(replace(MODEL, kv_heads=None), SYMBOLS, causal, False).double().eval()
    weights = dict(shared.state_dict())
    for name, weight in weights.items():
        if ".key." in name or ".value." in name:
            weights[name] = weight.unflatten(0, (2, 4)).repeat_interleave(3, dim=0).flatten(0, 1)
    full.load_state_dict(weights)
    for pad in (None, torch.arange(9) >= torch.tensor([[9], [6]])):
        torch.testing.assert_close(full(ids(), pad=pad), shared(ids(), pad=pad))


def test_a_tied_head_has_the_weights_of_the_embedding_and_its_own_bias():
    tied = randomized(Transformer(replace(MODEL, tie_embedding=True), SYMBOLS, True, False)).double().eval()
    free = Transformer(MODEL, SYMBOLS, True, False).double().eval()
    free.load_state_dict({**tied.state_dict(), "head.weight": tied.embedding.weight})
    assert torch.equal(free(ids()), tied(ids()))
    assert num_parameters(free) - num_parameters(tied) == SYMBOLS * MODEL.hidden
    tied(ids()).sum().backward()
    assert tied.head.bias.grad.abs().min() > 0


def test_both_heads_of_a_pair_are_tied_to_the_embedding():
    pair = AnchoredTransformer(replace(MODEL, tie_embedding=True), SYMBOLS)
    assert pair.denoiser.head.weight is pair.anchor.head.weight is pair.anchor.embedding.weight
    assert [name for name, _ in pair.named_parameters() if "head" in name] == ["anchor.head.bias", "denoiser.head.bias"]


def test_without_a_bridge_a_pair_is_one_network_of_all_blocks():
    model = replace(MODEL, blocks=2, denoiser_blocks=1, bridge="none", tie_heads=True)
    pair = randomized(AnchoredTransformer(model, SYMBOLS)).double().eval()
    whole = Transformer(replace(MODEL, blocks=3), SYMBOLS).double().eval()
    weights = {name.removeprefix("anchor."): weight for name, weight in pair.state_dict().items() if "anchor" in name}
    upper = {name.removeprefix("denoiser."): weight for name, weight in pair.state_dict().items() if "denoiser" in name}
    whole.load_state_dict({**weights, **{name.replace("blocks.0", "blocks.2"): w for name, w in upper.items()}})
    torch.testing.assert_close(pair(ids()), whole(ids()))


@pytest.mark.parametrize("method", ["ar", "a2r", "mdlm", "adlm", "sedd"])
@pytest.mark.parametrize("tied", mostly_slow([False, True], True))
def test_every_method_trains_it_from_scratch(method, tied):
    model = replace(MODEL, tie_embedding=tied, dropout=0.1)
    vocabulary, schedule = Vocabulary(SYMBOLS, SYMBOLS - 1, 0, 0), Schedule(eps=1e-3)
    config = Config(method=method, length=9, vocabulary=vocabulary, model=model, schedule=schedule)
    torch.manual_seed(0)
    network = method_of(config).build()
    optimizer = torch.optim.Adam(network.parameters(), 1e-2)
    x, losses = ids(8).clamp(max=SYMBOLS - 2), []
    for _ in range(40):
        loss = method_of(config).loss(network.train(), x, None, 0.0, batch_rng()).mean
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.8 * losses[0]
    unused = [name for name, weight in network.named_parameters() if weight.grad is None]
    assert not [name for name in unused if "anchor" not in name]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"family": "published", "kv_heads": 2}, "model.kv_heads 2 is an option of model.family llama"),
        ({"qk_norm": True}, "model.qk_norm True is an option of model.family published, and model.family is llama"),
        ({"kv_heads": 4}, "model.heads 6 is not a multiple of model.kv_heads 4"),
        ({"family": "gpt2"}, "model.family gpt2 learns its positions; give their number, such as model.positions=1024"),
        ({"positions": 8}, "model.positions 8 is an option of model.family gpt2, and model.family is llama"),
    ],
)
def test_options_of_another_family_are_user_errors(options, sentence):
    with pytest.raises(UserError, match=sentence):
        Model(**{"family": "llama", "hidden": 24, "heads": 6, **options})


def test_a_text_longer_than_the_learnt_positions_is_a_user_error():
    model = Model(family="gpt2", hidden=24, heads=6, positions=8)
    with pytest.raises(UserError, match=r"length 9 is more than the 8 learnt positions \(model.positions\)"):
        Config(length=9, model=model)
    assert Config(length=8, model=model).model.positions == 8
