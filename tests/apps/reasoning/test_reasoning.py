"""Rows, network and loss of the reasoning methods: identities between methods, and plain forms against fast ones."""

from dataclasses import replace

import pytest
import torch
from worlds import randomized

from adlm.apps.reasoning.datasets import gsm8k, prontoqa, prosqa
from adlm.apps.reasoning.network import (
    HuggingFaceModel,
    OwnModel,
    _fuse_norms,
    plain_hidden_states,
    read_rows,
    reasoning_loss,
    resize_vocabulary,
)
from adlm.apps.reasoning.problems import Problem
from adlm.apps.reasoning.rows import (
    ALL_STEPS,
    REASONING_METHODS,
    Encoder,
    SpecialIds,
    Stage,
    as_batch,
    collate,
    stages_of,
)
from adlm.apps.reasoning.solve import generate
from adlm.config.schema import Config, Data, Model, Reason
from adlm.models.transformer import Transformer

transformers = pytest.importorskip("transformers")

BYTES = 128
IDS = SpecialIds(pad=128, boa=129, slot=130, eoa=131, pause=132, eos=133)
PROBLEMS = [
    Problem(
        "Tom is a terpus. Every terpus is a brimpus. Every brimpus is a lempus. Is Tom a lempus or gorpus?",
        ("Tom is a terpus.", "Every terpus is a brimpus.", "Every brimpus is a lempus."),
        "Tom is a lempus.",
    ),
    Problem("Ada is a wug. Is Ada a wug or dax?", ("Ada is a wug.",), "Ada is a wug."),
]
ENCODER = Encoder(lambda texts: [list(text.encode("ascii")) for text in texts], prosqa.PROSQA, IDS)
ACOT, COT, COCONUT = REASONING_METHODS["acot"], REASONING_METHODS["cot"], REASONING_METHODS["coconut"]


def hidden_states(model, batch):
    return read_rows(model, batch.ids, batch.is_text, batch.slots)[0]


def gpt2():
    config = transformers.GPT2Config(vocab_size=134, n_positions=256, n_embd=16, n_layer=2, n_head=2)
    config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
    return HuggingFaceModel(transformers.GPT2LMHeadModel(config))


def llama():
    config = transformers.LlamaConfig(
        vocab_size=134, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2
    )
    return HuggingFaceModel(transformers.LlamaForCausalLM(config))


def own():
    model = Model(hidden=16, heads=2, blocks=2, condition=8, dropout=0.0)
    return OwnModel(randomized(Transformer(model, 134, causal=True, modulated=False)))


every_model = pytest.mark.parametrize("build", [gpt2, llama, own])


def built(build):
    torch.manual_seed(0)
    return build().double().eval()


def batch_of(method, stage, problems=PROBLEMS):
    rows = [ENCODER.row(problem, method, stage) for problem in ENCODER.encode(problems)]
    return as_batch(*collate(rows, IDS, method, stage.slots), IDS, method)


def loss_and_gradients(model, method, stage, weight=1.0):
    model.zero_grad()
    loss = reasoning_loss(model, batch_of(method, stage), weight)
    loss.total.backward()
    return loss, [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize(
    ("labels", "problem", "expected"),
    [
        (gsm8k.anchor_labels, Problem("q", ("<<16-3-4=9>>", "<<9*2=18>>"), "18"), "16 3 4 9 2 18"),
        (prosqa.anchor_labels, PROBLEMS[0], "Tom terpus brimpus lempus"),
        (
            prontoqa.anchor_labels,
            Problem(
                "q",
                ("Alex is a tumpus. Tumpuses are gorpuses.", "Alex is a gorpus. Gorpuses are shy.", "Alex is shy."),
                "True",
            ),
            "Alex tumpus gorpus",
        ),
    ],
    ids=["gsm8k", "prosqa", "prontoqa"],
)
def test_the_labels_of_the_worked_examples(labels, problem, expected):
    assert labels(problem) == tuple(expected.split())


def test_slots_are_trained_towards_the_labels_in_order_and_the_last_towards_the_end():
    batch = batch_of(ACOT, Stage(1, slots=3), PROBLEMS[:1])
    start = batch.slots.start
    assert batch.ids[0, start - 1] == IDS.boa
    assert batch.ids[0, start : start + 4].tolist() == [ord(" "), ord(" "), ord(" "), IDS.eoa]  # the first byte of each
    assert batch.anchors[0].nonzero()[:, 0].tolist() == [start, start + 1, start + 2, start + 3]
    assert not (batch.anchors & batch.predicted).any()
    assert batch.predicted[0, start + 4 :].all()


def test_slots_beyond_the_labels_have_no_target():
    batch = batch_of(ACOT, Stage(1, slots=5))
    long, short = batch.anchors[:, batch.slots.start : batch.slots.stop + 1].tolist()
    assert long == [True] * 4 + [False] * 2, "four labels: the fifth slot and [EOA] have none"
    assert short == [True] * 2 + [False] * 4
    assert (
        batch.ids[:, batch.slots.start : batch.slots.stop][~batch.anchors[:, batch.slots.start : batch.slots.stop]]
        == IDS.slot
    ).all()


@every_model
def test_without_slots_acot_is_cot_to_the_last_bit(build):
    model = built(build)
    ours, theirs = (loss_and_gradients(model, method, Stage(1)) for method in (ACOT, COT))
    assert torch.equal(ours[0].total, theirs[0].total)
    assert all(torch.equal(a, b) for a, b in zip(ours[1], theirs[1], strict=True))


@every_model
def test_with_anchor_weight_zero_acot_is_coconut_to_the_last_bit(build):
    model, stage = built(build), Stage(1, slots=3, left_out=2)
    ours = loss_and_gradients(model, ACOT, stage, weight=0.0)
    theirs = loss_and_gradients(model, COCONUT, stage, weight=0.0)
    assert torch.equal(ours[0].total, theirs[0].total)
    assert all(torch.equal(a, b) for a, b in zip(ours[1], theirs[1], strict=True))
    assert not torch.equal(ours[0].total, loss_and_gradients(model, ACOT, stage, weight=0.5)[0].total)


@every_model
@pytest.mark.parametrize("method", ["acot", "coconut-pause", "pause", "cot"])
def test_the_cached_forward_equals_the_plain_one_gradients_too(build, method):
    model, batch = built(build), batch_of(REASONING_METHODS[method], Stage(1, slots=3))
    results = []
    for form in (hidden_states, plain_hidden_states):
        model.zero_grad()
        hidden = form(model, batch)[batch.is_text]
        (hidden**2).sum().backward()
        results.append([hidden, *(p.grad for p in model.parameters() if p.grad is not None)])
    for cached, plain in zip(*results, strict=True):
        tolerance = 1e-3 if build is llama else 1e-9  # its norms compute in float32
        torch.testing.assert_close(cached, plain, rtol=tolerance, atol=tolerance)


@every_model
def test_a_slot_reads_the_hidden_state_before_it_and_not_its_id(build):
    model, batch = built(build), batch_of(ACOT, Stage(1, slots=2), PROBLEMS[:1])
    other = batch.ids.clone()
    other[:, batch.slots.start : batch.slots.stop] = 7
    assert torch.equal(hidden_states(model, batch), hidden_states(model, replace(batch, ids=other)))


@every_model
def test_positions_without_a_target_have_no_gradient(build, monkeypatch):
    """The loss of hidden states at the question, before unlabelled slots and at padding has none."""
    model, batch = built(build), batch_of(ACOT, Stage(1, slots=5))
    seen = []
    logits = model.logits
    model.logits = lambda hidden: seen.append(hidden) or logits(hidden)
    reasoning_loss(model, batch, 1.0)
    assert [len(rows) for rows in seen] == [int(batch.predicted.sum()), int(batch.anchors.sum())]
    assert int(batch.anchors.sum()) == 6
    hidden = hidden_states(model, batch).detach().requires_grad_()
    monkeypatch.setattr("adlm.apps.reasoning.network.read_rows", lambda *_: (hidden, None))
    reasoning_loss(model, batch, 1.0).total.backward()
    has_target = torch.zeros_like(batch.predicted)
    has_target[:, :-1] = (batch.predicted | batch.anchors)[:, 1:]
    assert (hidden.grad[~has_target] == 0).all()
    assert (hidden.grad[has_target].abs().sum(dim=-1) > 0).all()


@every_model
@pytest.mark.parametrize("method", ["acot", "coconut", "coconut-pause", "pause", "cot"])
def test_problems_generated_together_are_written_as_alone(build, method):
    model, method, num_slots = (
        built(build),
        REASONING_METHODS[method],
        3 if REASONING_METHODS[method].slots != "none" else 0,
    )
    prompts = [ENCODER.prompt(problem, method, num_slots) for problem in ENCODER.encode(PROBLEMS)]
    args = (IDS, method, num_slots, 12, torch.device("cpu"))
    together = generate(model, prompts, *args)
    assert together == [generate(model, [prompt], *args)[0] for prompt in prompts]
    assert len(together[0].slot_ids) == (num_slots + 1 if method.slots == "continuous" else 0)


@every_model
def test_generation_continues_the_row_that_training_read(build):
    """The first token written is the most likely one after the prompt in the training form."""
    model, stage = built(build), Stage(1, slots=2, left_out=ALL_STEPS)
    batch = batch_of(ACOT, stage, PROBLEMS[:1])
    logits = model.logits(hidden_states(model, batch))[0, batch.slots.stop]
    [written] = generate(
        model, [ENCODER.prompt(ENCODER.encode(PROBLEMS)[0], ACOT, 2)], IDS, ACOT, 2, 1, torch.device("cpu")
    )
    assert (written.ids or [IDS.eos]) == [int(logits.argmax())]


@every_model
def test_new_symbols_begin_near_the_mean_embedding_and_tied_layers_stay_tied(build):
    model = built(build)
    before = model.embed(torch.arange(134)).detach().clone()
    resize_vocabulary(model, 134, 139)
    after = model.embed(torch.arange(139))
    assert torch.equal(after[:134], before)
    assert (after[134:] - before.mean(dim=0)).abs().max() < before.std(dim=0).max()
    assert len({tuple(row.tolist()) for row in after[134:]}) == 5
    assert model.logits(after).shape == (139, 139)
    if build is gpt2:
        assert model.model.get_output_embeddings().weight is model.model.get_input_embeddings().weight


def test_curricula():
    def stages(method, data="prosqa", **options):
        return stages_of(Config(data=Data(name=data), reason=Reason(method, **options)))

    assert stages("cot", epochs=10) == [Stage(10)]
    assert stages("no-cot", epochs=8, first_epochs=2) == [Stage(10, 0, ALL_STEPS)]
    assert stages("pause", epochs=10, slots=6) == [Stage(10, 6, ALL_STEPS)]
    acot = stages("acot", first_epochs=5)
    assert [(stage.epochs, stage.slots, stage.left_out) for stage in acot] == [
        (5, 0, 0), (5, 1, 1), (5, 2, 2), (5, 3, 3), (5, 4, 4), (5, 5, 5), (25, 6, 6)
    ]  # fmt: skip
    assert [stage.reset_optimizer for stage in acot] == [False] + [True] * 6
    gsm8k = stages("acot", "gsm8k", epochs=25, stage_epochs=3, slots=2)
    assert [(stage.epochs, stage.slots, stage.left_out) for stage in gsm8k] == [(3, 1, 0), (22, 2, 0)]
    coconut = stages("coconut", "gsm8k", epochs=25, stage_epochs=3, slots=6, slots_a_stage=2)
    assert [(stage.epochs, stage.slots, stage.left_out) for stage in coconut] == [
        (3, 2, 1), (3, 4, 2), (3, 6, 3), (16, 6, ALL_STEPS)
    ]  # fmt: skip
    icot = stages("icot", epochs=9, stage_epochs=3, slots=2, tokens_a_stage=5)
    assert [(stage.epochs, stage.slots, stage.left_out, stage.left_out_tokens) for stage in icot] == [
        (3, 0, 0, 5), (3, 0, 0, 10), (3, 0, ALL_STEPS, 0)
    ]  # fmt: skip
    assert [stage.epochs for stage in stages("coconut", epochs=4, stage_epochs=3)] == [3, 1], "as far as the epochs go"
    assert stages("acot", slots=0, epochs=3) == [Stage(3, reset_optimizer=True)]


@pytest.mark.parametrize("weight", [torch.ones(16), torch.linspace(0.5, 2, 16)])
def test_fused_norms_are_those_of_transformers(weight):
    model = llama()
    norms = [module for module in model.modules() if hasattr(module, "variance_epsilon")]
    assert len(norms) == 5
    hidden = 3 * torch.randn(2, 7, 16, generator=torch.Generator().manual_seed(0))
    for norm in norms:
        norm.weight.data.copy_(weight)
        plain = type(norm).forward(norm, hidden)
        assert norm.forward.func is not type(norm).forward
        torch.testing.assert_close(norm(hidden), plain)
        torch.testing.assert_close(norm(hidden.bfloat16()), plain.bfloat16(), rtol=2e-2, atol=2e-2)


def test_a_norm_of_another_formula_is_left_alone():
    class OnePlusWeight(torch.nn.Module):
        variance_epsilon = 1e-6
        weight = torch.nn.Parameter(torch.zeros(4))

        def forward(self, hidden):
            return torch.nn.functional.rms_norm(hidden, (4,), 1 + self.weight, self.variance_epsilon)

    norm = OnePlusWeight()
    _fuse_norms(norm)
    assert "forward" not in vars(norm)


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # CPUs without bfloat16
def test_layers_run_in_the_type_of_autocast():
    model, batch = llama(), batch_of(ACOT, Stage(1, slots=2), PROBLEMS)
    plain = hidden_states(model, batch)
    with torch.autocast("cpu", torch.bfloat16):
        hidden = hidden_states(model, batch)
    assert plain.dtype == torch.float32
    assert hidden.dtype == torch.bfloat16
    torch.testing.assert_close(hidden[batch.is_text].float(), plain[batch.is_text], rtol=0.1, atol=0.1)


def test_icot_leaves_out_the_first_tokens_of_the_reasoning():
    method, [problem] = REASONING_METHODS["icot"], ENCODER.encode(PROBLEMS[:1])
    whole = ENCODER.row(problem, method, Stage(1))
    for num in (0, 7, 1000):
        row = ENCODER.row(problem, method, Stage(1, left_out_tokens=num))
        reasoning = whole.ids[whole.num_prompt : -len(problem.answer)].tolist()
        assert row.ids.tolist() == [*problem.question.tolist(), *reasoning[num:], *problem.answer.tolist()]
