"""Parity with the released code, and that disagreement is detected."""

import io
import json
import math
import re
import shutil

import numpy as np
import pytest
import torch
from comparison import ParityRow, compare
from worlds import randomized, seeded

from adlm.checkpoints.published import RENAMED, read_checkpoint
from adlm.cli.main import main
from adlm.config.schema import Anchor, Config, Model, Schedule, Time, Vocabulary
from adlm.diffusion.beliefs import subs
from adlm.diffusion.objectives import anchor_mask
from adlm.errors import UserError
from adlm.methods import method_of
from adlm.methods.masked_diffusion import NoisedBatch


@pytest.fixture
def copy(test_vectors, tmp_path):
    """A copy of a golden folder, to be damaged."""
    return shutil.copytree(test_vectors, tmp_path / "golden")


def spoil_array(folder, file, key, change):
    with np.load(folder / file) as content:
        arrays = dict(content)
    arrays[key] = change(arrays[key])
    np.savez(folder / file, **arrays)


def spoil_json(folder, change):
    content = json.loads((folder / "golden.json").read_text())
    change(content)
    (folder / "golden.json").write_text(json.dumps(content))


def test_every_number_of_the_test_vectors_agrees_with_the_released_code(test_vectors):
    report = compare(test_vectors)
    assert [row.name for row in report.rows if not row.ok] == []
    assert report.unchecked == []


def test_a_clone_alone_can_check_every_transition_and_the_losses_of_all_five_released_methods(test_vectors):
    names = [row.name for row in compare(test_vectors).rows]
    assert len(names) == 60
    assert sum(name.startswith("transition ") for name in names) == 25
    assert {"adlm val_loss", "mdlm loss", "sedd loss", "d3pm loss", "ar loss"} <= set(names)


def test_every_number_of_a_complete_golden_folder_agrees_or_is_reported_as_unchecked(golden_folder):
    report = compare(golden_folder)
    assert [row.name for row in report.rows if not row.ok] == []
    assert {"adlm-tiny-official.ckpt ema log_prob", "d3pm loss"} <= {row.name for row in report.rows}
    assert all(entry.startswith("adlm_transitions.npz: ") for entry in report.unchecked)


@pytest.mark.parametrize(
    ("file", "key", "change"),
    [
        ("adlm_forward.npz", "anchor_logits", lambda a: a + 2e-4),
        ("adlm_forward.npz", "denoiser_logits", lambda a: np.where(a == a.max(), a + 1e-3, a)),
        ("adlm_forward.npz", "log_prob", lambda a: np.where(a < -1e5, 0.0, a)),
        ("adlm_forward.npz", "log_prob", lambda a: np.full_like(a, np.nan)),
        ("adlm_forward.npz", "anchor_mask_tau2", lambda a: 1 - a),
        ("adlm_transitions.npz", "T2", lambda a: a + 1e-4),
    ],
)
def test_a_changed_array_is_detected(copy, file, key, change):
    spoil_array(copy, file, key, change)
    assert not compare(copy).ok


@pytest.mark.parametrize("key", ["train_loss_tau5_gamma0.5", "warmup_loss_step1000_of_1000000_tau2", "val_loss"])
def test_a_changed_loss_is_detected(copy, key):
    spoil_json(copy, lambda content: content["adlm_losses"].update({key: content["adlm_losses"][key] * (1 + 3e-5)}))
    assert [row.name for row in compare(copy).rows if not row.ok] == [f"adlm {key}"]


def test_numbers_that_are_not_compared_are_reported(copy):
    shutil.copy(copy / "adlm-tiny.ckpt", copy / "duo-tiny.ckpt")
    np.savez(copy / "duo_loss.npz", x0=np.zeros(1), nlls=np.zeros(1))
    spoil_json(copy, lambda content: content.update(baseline_losses={"duo": 1.0}, adlm_losses={"new_loss": 2.0}))
    assert compare(copy).unchecked == [
        "duo-tiny.ckpt",
        "duo_loss.npz: nlls",
        "golden.json adlm_losses: new_loss",
        "golden.json baseline_losses: duo",
    ]


def test_nan_is_never_within_a_tolerance():
    assert not ParityRow("nan", float("nan"), 1.0).ok


def their_name(ours: str) -> str:
    """A weight's name in the released code, from the table that reads it."""
    prefix, name = ours.split(".", 1) if ours.startswith(("anchor.", "denoiser.")) else ("anchor", ours)
    theirs = {
        "embedding.weight": "vocab_embed.embedding",
        "bridge": "vocab_embed.0",
        "trunk.condition.inner": "sigma_map.mlp.0",
        "trunk.condition.outer": "sigma_map.mlp.2",
        "trunk.norm": "output_layer.norm_final",
        "trunk.modulation": "output_layer.adaLN_modulation",
        "trunk.blocks": "blocks",
        "head": "output_layer.linear",
    }
    for start, replacement in theirs.items():
        if name.startswith(start):
            name = replacement + name.removeprefix(start)
            break
    for part, replacement in {
        ".qkv.": ".attn_qkv.",
        ".out.": ".attn_out.",
        ".widen.": ".mlp.0.",
        ".narrow.": ".mlp.2.",
        ".modulation.": ".adaLN_modulation.",
    }.items():
        name = name.replace(part, replacement) if name.startswith("blocks.") else name
    return f"{'backbone' if prefix == 'anchor' else 'denoiser'}.{name}"


def write_checkpoint(path, network, model, averaged=None, legacy=False):
    state = {}
    for name, value in network.state_dict().items():
        theirs = their_name(name)
        state[theirs.replace("denoiser.", "replica.") if legacy else theirs] = value
        if theirs.endswith("sigma_map.mlp.2.bias"):
            prefix = theirs.split(".")[0].replace("denoiser", "replica" if legacy else "denoiser")
            state[f"{prefix}.rotary_emb.inv_freq"] = torch.zeros(model.hidden // model.heads // 2)
    content = {"state_dict": state, "global_step": 3}
    if averaged is not None:
        content["ema"] = {"decay": 0.9999, "num_updates": 3, "shadow_params": list(averaged.parameters())}
    torch.save(content, path)


@pytest.fixture
def other_sizes(tmp_path):
    """A golden folder of other sizes, its mask in the middle of the vocabulary, with numbers of our own making.

    It says nothing of the released code: it shows that sizes, names and special ids are read from the folder.
    """
    model = Model(hidden=24, heads=3, blocks=3, denoiser_blocks=2, condition=10)
    config = Config(vocabulary=Vocabulary(17, 5), model=model, schedule=Schedule(eps=1e-3))
    network, averaged = (randomized(method_of(config).build(), seed).eval() for seed in (1, 2))
    x0 = torch.randint(0, 5, (2, 9), generator=seeded())
    xt, t = x0.masked_fill(torch.rand(2, 9, generator=seeded()) < 0.5, 5), torch.tensor([0.37, 0.9999])
    losses = {}
    with torch.no_grad():
        forward = {"anchor_logits": network.anchor_logits(xt), "denoiser_logits": network(xt)}
        forward["log_prob"] = subs(network(xt), xt, 5).clamp(min=-1e6)
        ema = {
            "xt": xt,
            "anchor_logits": averaged.anchor_logits(xt),
            "log_prob": subs(averaged(xt), xt, 5).clamp(min=-1e6),
        }
        for tau, gamma in ((3, 0.25), (1, 0.003)):
            method = method_of(Config(**{**vars(config), "anchor": Anchor(gamma=gamma, tau=tau)}))
            losses[f"train_loss_tau{tau}_gamma{gamma}"] = method.loss_at(
                network, x0, NoisedBatch(xt, t.double())
            ).mean.item()
        plain = Config(**{**vars(config), "method": "mdlm", "schedule": Schedule(), "time": Time(steps=50)})
        alone = randomized(method_of(plain).build(), 3).eval()
        above = torch.tensor([19 / 50, 1 - 1e-4]).double()  # their grid time over .37, and what they make of 1
        nats = method_of(plain).loss_at(alone, x0, NoisedBatch(xt, above, above - 1 / 50)).nats
    write_checkpoint(tmp_path / "adlm-tiny.ckpt", network, model, averaged)
    write_checkpoint(tmp_path / "adlm-tiny-legacy.ckpt", network, model, legacy=True)
    write_checkpoint(tmp_path / "mdlm_T50-tiny.ckpt", alone, model)
    masks = {"anchor_mask_tau4": anchor_mask(x0, 4, 17).long()}
    np.savez(tmp_path / "adlm_forward.npz", x0=x0, xt=xt, t=t, **forward, **masks)
    np.savez(tmp_path / "adlm_forward_ema.npz", **ema)
    np.savez(tmp_path / "mdlm_T50_loss.npz", x0=x0, xt=xt, t=t, nlls=nats)
    meta = {"vocab_size_with_mask": 17, "mask_index": 5}
    baselines = {"mdlm_T50": nats.mean().item()}
    content = {"meta": meta, "adlm_losses": losses, "baseline_losses": baselines, "transitions": []}
    (tmp_path / "golden.json").write_text(json.dumps(content))
    return tmp_path


def test_a_folder_of_other_sizes_is_compared_by_its_own_metadata(other_sizes):
    report = compare(other_sizes)
    assert [row.name for row in report.rows if not row.ok] == []
    assert report.unchecked == []
    assert {"adlm-tiny.ckpt ema log_prob", "adlm-tiny-legacy.ckpt raw log_prob", "mdlm_T50 loss"} <= {
        row.name for row in report.rows
    }


def test_sizes_are_read_off_the_weights(other_sizes):
    published = read_checkpoint(other_sizes / "adlm-tiny.ckpt")
    assert published.num_symbols == 17
    assert published.model == Model(hidden=24, heads=3, blocks=3, denoiser_blocks=2, condition=10)
    assert published.ema_weights.keys() == published.weights.keys()


def test_no_two_rules_of_the_renaming_claim_one_name(test_vectors):
    state = torch.load(test_vectors / "adlm-tiny.ckpt", weights_only=True)["state_dict"]
    for name in (key.partition(".")[2] for key in state):
        assert sum(bool(re.search(theirs, name)) for theirs, _ in RENAMED if theirs.startswith("^")) == (
            not name.startswith("rotary")
        )


@pytest.mark.parametrize(
    ("spoil", "sentence"),
    [
        (lambda f: (f / "golden.json").unlink(), "golden.json cannot be read: No such file"),
        (lambda f: (f / "golden.json").write_text("{"), "golden.json is not JSON"),
        (lambda f: (f / "golden.json").write_text("[]"), "must hold sections"),
        (lambda f: spoil_json(f, lambda c: c.pop("meta")), "meta must give vocab_size_with_mask and mask_index"),
        (lambda f: spoil_json(f, lambda c: c["meta"].update(mask_index=54)), "mask_id 54 is outside the vocabulary"),
        (
            lambda f: spoil_json(f, lambda c: c["meta"].update(vocab_size_with_mask=60)),
            "says 60 symbols, the weights have 54",
        ),
        (lambda f: (f / "adlm_forward.npz").write_bytes(b"PK"), "cannot be read as the arrays of a .npz"),
        (lambda f: (f / "adlm-tiny.ckpt").write_bytes(b"PK"), "is damaged or not a checkpoint: torch files"),
        (lambda f: torch.save({"state_dict": 3}, f / "adlm-tiny.ckpt"), "not a released checkpoint"),
        (
            lambda f: torch.save({"state_dict": {"w": torch.ones(1)}}, f / "adlm-tiny.ckpt"),
            "belongs to no known network",
        ),
        (lambda f: spoil_array(f, "adlm_forward.npz", "log_prob", lambda a: a[:1]), "have shape"),
        (lambda f: [path.unlink() for path in f.glob("*.npz")], "has nothing to compare"),
    ],
)
def test_a_damaged_folder_is_a_one_line_error(copy, spoil, sentence):
    spoil(copy)
    with pytest.raises(UserError, match=sentence) as caught:
        compare(copy)
    assert "\n" not in str(caught.value)


DAMAGE = {
    "four bytes for weights": lambda f: (f / "adlm-tiny.ckpt").write_bytes(b"junk"),
    "no bytes for weights": lambda f: (f / "adlm-tiny.ckpt").write_bytes(b""),
    "arrays for weights": lambda f: shutil.copy(f / "adlm_forward.npz", f / "adlm-tiny.ckpt"),
    "a stray array file": lambda f: (f / "stray.npz").write_bytes(b"junk"),
    "bits flipped in arrays": lambda f: flip(f / "adlm_transitions.npz"),
    "bits flipped in weights": lambda f: flip(f / "adlm-tiny.ckpt"),
    "one array for many": lambda f: (f / "adlm_forward.npz").write_bytes(array_file()),
    "text for numbers": lambda f: spoil_array(f, "adlm_forward.npz", "x0", lambda a: a.astype(str)),
    "complex numbers": lambda f: spoil_array(f, "adlm_forward.npz", "t", lambda a: a.astype(complex)),
    "flat ids": lambda f: spoil_array(f, "adlm_forward.npz", "xt", lambda a: a.ravel()),
    "ids that are no ids": lambda f: spoil_array(f, "adlm_forward.npz", "xt", lambda a: a + 40),
    "negative ids": lambda f: spoil_array(f, "adlm_forward.npz", "x0", lambda a: a - 9),
    "half ids": lambda f: spoil_array(f, "adlm_forward.npz", "x0", lambda a: a / 2),
    "one row too few": lambda f: spoil_array(f, "adlm_forward.npz", "x0", lambda a: a[:2]),
    "one time too few": lambda f: spoil_array(f, "adlm_forward.npz", "t", lambda a: a[:2]),
    "time zero": lambda f: spoil_array(f, "adlm_forward.npz", "t", lambda a: 0 * a),
    "not a time": lambda f: spoil_array(f, "adlm_forward.npz", "t", lambda a: a * np.nan),
    "another shape of states": lambda f: spoil_array(f, "adlm_transitions.npz", "xt", lambda a: a[:, :5]),
    "nothing for a loss": lambda f: spoil_json(f, lambda c: c["adlm_losses"].update(val_loss=None)),
    "text for a loss": lambda f: spoil_json(f, lambda c: c["adlm_losses"].update(loglinear_sigma="x")),
    "ragged noise": lambda f: spoil_json(f, lambda c: c["adlm_losses"].update(loglinear_sigma=[[1], 2])),
    "no transitions": lambda f: spoil_json(f, lambda c: c.update(transitions=None)),
    "a transition of nothing": lambda f: spoil_json(f, lambda c: c.update(transitions=[{}])),
    "a transition without a time": lambda f: spoil_json(f, lambda c: c["transitions"][0].pop("dt")),
    "an endless vocabulary": lambda f: spoil_json(f, lambda c: c["meta"].update(vocab_size_with_mask=math.inf)),
    "losses that are no mapping": lambda f: spoil_json(f, lambda c: c.update(adlm_losses=[1])),
}


def array_file():
    """The bytes of a .npy."""
    buffer = io.BytesIO()
    np.save(buffer, np.zeros(3))
    return buffer.getvalue()


def flip(path):
    """Every hundredth byte turned over."""
    content = bytearray(path.read_bytes())
    content[::100] = bytes(255 - byte for byte in content[::100])
    path.write_bytes(content)


@pytest.mark.parametrize("damage", DAMAGE)
def test_no_damage_is_a_traceback(copy, damage):
    DAMAGE[damage](copy)
    with pytest.raises(UserError) as caught:
        compare(copy)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize("key", ["train_loss_tau1_gammaX", "warmup_loss_step1_of_0_tau2", "train_loss_tau1_gamma0,5"])
def test_an_unknown_loss_is_reported_as_unchecked(copy, key):
    spoil_json(copy, lambda content: content["adlm_losses"].update({key: 1.0}))
    assert compare(copy).unchecked == [f"golden.json adlm_losses: {key}"]


def test_transitions_without_their_arrays_are_reported_as_unchecked(copy):
    (copy / "adlm_transitions.npz").unlink()
    assert "adlm_transitions.npz (missing): mdlm at 0.9" in compare(copy).unchecked


def test_missing_weights_are_named(copy):
    content = torch.load(copy / "adlm-tiny.ckpt", weights_only=True)
    content["state_dict"].pop("denoiser.blocks.0.attn_out.weight")
    torch.save(content, copy / "adlm-tiny.ckpt")
    with pytest.raises(UserError, match=r"weight denoiser.trunk.blocks.0.out.weight is missing for method adlm"):
        compare(copy)


def test_a_checkpoint_that_would_run_code_runs_none(copy, tmp_path):
    class Hostile:
        def __reduce__(self):
            return (open, (str(tmp_path / "ran"), "w"))

    content = torch.load(copy / "adlm-tiny.ckpt", weights_only=True)
    torch.save({**content, "hyper_parameters": Hostile()}, copy / "adlm-tiny.ckpt")
    with pytest.raises(UserError, match=r"it names _?io.open, which no checkpoint needs; nothing in it was executed"):
        compare(copy)
    assert not (tmp_path / "ran").exists()


def test_without_the_tests_the_command_says_where_they_are(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr("adlm.cli.parity.COMPARISON", tmp_path / "comparison.py")
    assert main(["parity", str(tmp_path)]) == 2
    assert "run it in a clone of the repository" in capsys.readouterr().err
