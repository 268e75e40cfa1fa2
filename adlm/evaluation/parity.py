"""Our numbers beside those of the released code. Knows what is compared and how closely it must agree.

The released code's schedule is log-linear with eps 1e-3 in training; its caching samplers and its discrete-time losses
use alpha = 1 - t.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from adlm.config.schema import Anchor, Config, Data, Schedule, Time
from adlm.diffusion import schedules
from adlm.diffusion.anchors import anchor_mask
from adlm.diffusion.beliefs import subs
from adlm.diffusion.masking import posterior, remasking_ceiling
from adlm.errors import UserError
from adlm.evaluation.golden import Golden
from adlm.methods.adlm import Adlm
from adlm.methods.masked_diffusion import Noised
from adlm.methods.mdlm import Mdlm
from adlm.models.anchored import AnchoredTransformer
from adlm.models.transformer import Transformer
from adlm.published import Published, read_published
from adlm.sampling.plain import REMASKING

EPS = 1e-3
GAMMA = 3e-3
LOGITS = 1e-4  # absolute
LOSSES = 1e-5  # relative
PROBABILITIES = 1e-5  # absolute


@dataclass(frozen=True)
class Row:
    """One comparison."""

    name: str
    error: float
    """The largest found; not a number where ours is not."""
    tolerance: float
    relative: bool = False

    @property
    def ok(self) -> bool:
        return self.error <= self.tolerance  # a NaN is never within


@dataclass(frozen=True)
class Report:
    rows: list[Row]
    unchecked: list[str]

    @property
    def ok(self) -> bool:
        return all(row.ok for row in self.rows)


def compare(folder: Path) -> Report:
    """Every comparison that the folder has numbers for."""
    golden = Golden(folder)
    rows = [row for check in (_adlm, _schedule, _mdlm) for row in check(golden)]
    if not rows:
        raise UserError(f"{folder} has nothing to compare: no adlm-tiny.ckpt with adlm_forward.npz, no mdlm-tiny.ckpt")
    return Report(rows, golden.untaken())


@torch.no_grad()
def _adlm(golden: Golden) -> Iterator[Row]:
    file = "adlm_forward.npz"
    if not golden.has("adlm-tiny.ckpt", file):
        return
    published = read_published(golden.checkpoint("adlm-tiny.ckpt"))
    config = _config(golden, published)
    network = _pair(config, published.weights)
    xt, mask_id = golden.array(file, "xt"), golden.vocabulary().mask_id
    for part in ("anchor_logits", "denoiser_logits", "log_prob"):
        yield _apart(f"adlm {part}", _output(network, xt, mask_id, part), golden.array(file, part), LOGITS)
    yield from _anchor_masks(golden, file)
    yield from _losses(golden, config, network, file)
    yield from _transitions(golden, _output(network, xt, mask_id, "log_prob").exp())
    if published.averaged and golden.has("adlm_forward_ema.npz"):
        averaged, file = _pair(config, published.averaged), "adlm_forward_ema.npz"
        for part in ("anchor_logits", "log_prob"):
            ours = _output(averaged, golden.array(file, "xt"), mask_id, part)
            yield _apart(f"adlm ema {part}", ours, golden.array(file, part), LOGITS)
    if golden.has("adlm-tiny-legacy.ckpt"):
        legacy = read_published(golden.checkpoint("adlm-tiny-legacy.ckpt"))
        ours = _output(_pair(config, legacy.weights), xt, mask_id, "log_prob")
        yield _apart("adlm legacy keys, log_prob", ours, golden.array("adlm_forward.npz", "log_prob"), LOGITS)


def _anchor_masks(golden: Golden, file: str) -> Iterator[Row]:
    x = golden.array(file, "x0")
    for key in golden.keys(file):
        if found := re.fullmatch(r"anchor_mask_tau(\d+)", key):
            ours = anchor_mask(x, int(found[1]), golden.vocabulary().size)
            yield _apart(f"anchor mask, tau {found[1]}", ours.float(), golden.array(file, key).float(), 0.0)


def _losses(golden: Golden, config: Config, network: AnchoredTransformer, file: str) -> Iterator[Row]:
    x, noised = golden.array(file, "x0"), Noised(golden.array(file, "xt"), golden.array(file, "t").double())
    for key in golden.section("adlm_losses"):
        if found := re.fullmatch(r"train_loss_tau(\d+)_gamma(.+)", key):
            tau, gamma, progress = int(found[1]), float(found[2]), 1.0
        elif found := re.fullmatch(r"warmup_loss_step(\d+)_of_(\d+)_tau(\d+)", key):
            tau, gamma, progress = int(found[3]), GAMMA, int(found[1]) / int(found[2])
        elif key == "val_loss":
            tau, gamma, progress = 0, 0.0, 1.0
        else:
            continue
        method = Adlm(replace(config, anchor=Anchor(gamma=gamma, tau=tau)))
        ours = method.loss_at(network, x, noised, progress=progress).mean
        theirs = torch.tensor(golden.number("adlm_losses", key))
        yield _apart(f"adlm {key}", ours, theirs, LOSSES, relative=True)


def _transitions(golden: Golden, beliefs: Tensor) -> Iterator[Row]:
    """One reverse step of the samplers whose sigma depends on the step alone; these run with alpha = 1 - t."""
    file, mask_id = "adlm_transitions.npz", golden.vocabulary().mask_id
    for entry in golden.transitions() if golden.has(file) else []:
        sampler = {"mdlm": "ancestral"}.get(entry["name"], entry["name"])
        if sampler not in REMASKING:
            continue
        alpha_t = torch.tensor(1 - entry["t"], dtype=torch.float64)
        alpha_s = alpha_t + entry["dt"]
        sigma = REMASKING[sampler](entry.get("eta", 0.0), remasking_ceiling(alpha_s, alpha_t))
        ours = posterior(golden.array(file, "xt"), beliefs.double(), alpha_s, alpha_t, mask_id, sigma)
        name = f"transition {entry['name']} at t = {entry['t']}"
        yield _apart(name, ours, golden.array(file, entry["key"]), PROBABILITIES)


def _schedule(golden: Golden) -> Iterator[Row]:
    schedule = schedules.LogLinear(EPS)
    for key, ours in (("loglinear_sigma", schedules.sigma), ("loglinear_dsigma", schedules.sigma_prime)):
        if key in golden.section("adlm_losses") and golden.has("adlm_forward.npz"):
            t = golden.array("adlm_forward.npz", "t").double()
            theirs = torch.tensor(golden.number("adlm_losses", key))
            yield _apart(key, ours(schedule, t), theirs, LOSSES, relative=True)


@torch.no_grad()
def _mdlm(golden: Golden) -> Iterator[Row]:
    """The plain baseline in continuous time, and in T discrete steps: there the released loss has eps 0."""
    for path in sorted(golden.folder.glob("mdlm*-tiny.ckpt")):
        name = path.name.removesuffix("-tiny.ckpt")
        steps = re.fullmatch(r"mdlm(?:_T(\d+))?", name)
        file = f"{name}_loss.npz"
        if steps is None or not golden.has(file):
            continue
        published = read_published(golden.checkpoint(path.name))
        config = _config(golden, published)
        t, s = golden.array(file, "t"), None
        if steps[1]:
            config = replace(config, schedule=Schedule(eps=0.0), time=Time(steps=int(steps[1])))
            t, s = _their_step(t, int(steps[1]))
        x = golden.array(file, "x0")
        network = Transformer(published.model, published.num_symbols).eval()
        _load(network, published.weights)
        loss = Mdlm(config).loss_at(network, x, Noised(golden.array(file, "xt"), t.double(), s))
        yield _apart(f"{name} nats a token", loss.nats, golden.array(file, "nlls"), LOSSES, relative=True)
        if name in golden.section("baseline_losses"):
            theirs = torch.tensor(golden.number("baseline_losses", name))
            yield _apart(f"{name} loss", loss.mean, theirs, LOSSES, relative=True)


def _their_step(t: Tensor, steps: int) -> tuple[Tensor, Tensor]:
    """The step (t, s) that the released code makes of a drawn time: the grid time above it, and 1 - 1e-4 for 1."""
    above = ((t * steps).int() + 1).double() / steps
    clamped = above.clamp(max=1 - 1e-4)
    return clamped, clamped - 1 / steps


def _config(golden: Golden, published: Published) -> Config:
    vocabulary = golden.vocabulary()
    if vocabulary.size != published.num_symbols:
        raise UserError(
            f"{golden.folder}: golden.json says {vocabulary.size} symbols, the weights have {published.num_symbols}"
        )
    return Config(vocabulary=vocabulary, model=published.model, schedule=Schedule(eps=EPS), data=Data(pad="attended"))


def _pair(config: Config, weights: dict[str, Tensor]) -> AnchoredTransformer:
    network = Adlm(config).build().eval()
    _load(network, weights)
    return network


def _load(network: torch.nn.Module, weights: dict[str, Tensor]) -> None:
    try:
        network.load_state_dict(weights)
    except RuntimeError as error:
        raise UserError(f"the weights do not fit the network they describe: {' '.join(str(error).split())}") from None


def _output(network: AnchoredTransformer, z: Tensor, mask_id: int, part: str) -> Tensor:
    if part == "anchor_logits":
        return network.anchor_logits(z)
    logits = network(z)
    return subs(logits, z, mask_id) if part == "log_prob" else logits


def _apart(name: str, ours: Tensor, theirs: Tensor, tolerance: float, relative: bool = False) -> Row:
    """The largest difference; a relative one is to the largest of their values, unless all of those are 0.

    The released code writes -1,000,000 for what is impossible, and we write -inf: both count as the same.
    """
    if ours.shape != theirs.shape:
        raise UserError(f"{name}: the golden numbers have shape {tuple(theirs.shape)}, ours {tuple(ours.shape)}")
    ours, theirs = ours.double(), theirs.double()
    same = (ours == -torch.inf) & (theirs < -1e5)
    difference = (ours - theirs).abs()
    if relative and theirs.any():
        difference = difference / theirs.abs().max()
    return Row(name, difference.masked_fill(same, 0.0).max().item(), tolerance, relative)
