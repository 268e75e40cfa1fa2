"""Parity with the released code, for `adlm parity` and the tests: a folder of its outputs, of any sizes, and ours.

The released code trains with the log-linear schedule with eps 1e-3; its caching samplers and its discrete-time losses
use alpha = 1 - t.
"""

import re
import struct
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from adlm.checkpoints.model_folder import network_of
from adlm.checkpoints.published import PublishedCheckpoint, read_checkpoint
from adlm.config.schema import Anchor, Config, Data, MethodName, Sampling, Schedule, Time, Vocabulary
from adlm.diffusion import schedules
from adlm.diffusion.beliefs import subs
from adlm.diffusion.masking import remasking_ceiling, transition
from adlm.diffusion.objectives import anchor_mask
from adlm.diffusion.times import BatchRng
from adlm.errors import UserError
from adlm.files import opened, read_json
from adlm.methods.adlm import Adlm
from adlm.methods.ar import Ar
from adlm.methods.d3pm import D3pm
from adlm.methods.masked_diffusion import NoisedBatch
from adlm.methods.mdlm import Mdlm
from adlm.methods.method import Loss
from adlm.methods.sedd import Sedd
from adlm.models.anchored import AnchoredTransformer
from adlm.sampling.adaptive import confident_remasking
from adlm.sampling.reference import shape_everywhere
from adlm.sampling.samplers import sampler_of

EPS = 1e-3
GAMMA = 3e-3
LOGITS = 1e-4  # absolute
LOSSES = 1e-5  # relative
SCORE_ENTROPIES = 1e-4  # relative
D3PM_STEPS = 1000
PROBABILITIES = 1e-5  # absolute


@dataclass(frozen=True)
class ParityRow:
    """One comparison."""

    name: str
    error: float
    """The largest error; NaN where ours is."""
    tolerance: float
    relative: bool = False

    @property
    def ok(self) -> bool:
        return self.error <= self.tolerance  # False for NaN


@dataclass(frozen=True)
class ParityReport:
    rows: list[ParityRow]
    unchecked: list[str]

    @property
    def ok(self) -> bool:
        return all(row.ok for row in self.rows)


class Golden:
    """golden.json, the .npz arrays and the .ckpt weights of one folder; records which entries were read."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._arrays: dict[str, dict[str, np.ndarray[Any, Any]]] = {}
        self._used: set[str] = set()
        path = folder / "golden.json"
        try:
            self._json = read_json(path)
        except UserError as error:
            raise UserError(f"{error}; give a folder with a golden.json") from None
        if not isinstance(self._json, dict):
            raise UserError(f"{path} must hold sections such as meta and adlm_losses")

    def vocabulary(self) -> Vocabulary:
        meta = self.section("meta")
        try:
            return Vocabulary(int(meta["vocab_size_with_mask"]), int(meta["mask_index"]))
        except (KeyError, TypeError, OverflowError):
            raise UserError(
                f"{self.folder / 'golden.json'}: meta must give vocab_size_with_mask and mask_index as whole numbers"
            ) from None

    def section(self, name: str) -> dict[str, Any]:
        section = self._json.get(name, {})
        if not isinstance(section, dict):
            raise UserError(f"{self.folder / 'golden.json'}: {name} must be a mapping")
        return section

    def transitions(self) -> list[dict[str, Any]]:
        """The sampler steps in the folder, each with its key, name, t and dt."""
        entries = self._json.get("transitions", [])
        for entry in entries if isinstance(entries, list) else [None]:
            fields = entry if isinstance(entry, dict) else {}
            has_names = all(isinstance(fields.get(key), str) for key in ("key", "name"))
            has_times = all(isinstance(fields.get(key), (int, float)) for key in ("t", "dt"))
            if not has_names or not has_times or not isinstance(fields.get("eta", 0.0), (int, float)):
                raise UserError(f"{self.folder / 'golden.json'}: a transition must have key, name, t and dt")
        return list(entries)

    def number(self, section: str, key: str) -> Tensor:
        """A number or a list of numbers from golden.json; marks it as used."""
        self._used.add(f"{section} {key}")
        value = self._json[section][key]
        if not all(isinstance(number, (int, float)) for number in (value if isinstance(value, list) else [value])):
            raise UserError(f"{self.folder / 'golden.json'}: {section} {key} must be a number, not {value!r}")
        return torch.tensor(value, dtype=torch.float64)

    def has(self, *files: str) -> bool:
        return all((self.folder / file).is_file() for file in files)

    def array(self, file: str, key: str) -> Tensor:
        """One array of a .npz; marks it as used."""
        arrays = self._read(file)
        if key not in arrays:
            raise UserError(f"{self.folder / file} has no array {key!r}; it has {', '.join(arrays)}")
        self._used.add(f"{file} {key}")
        if arrays[key].dtype.kind not in "iufb":
            raise UserError(f"{self.folder / file}: array {key!r} is not made of numbers")
        return torch.from_numpy(arrays[key].astype(arrays[key].dtype.newbyteorder("=")))

    def ids(self, file: str, key: str) -> Tensor:
        """An array of token ids (B, L); marks it as used."""
        ids, size = self.array(file, key), self.vocabulary().size
        if ids.ndim != 2 or ids.is_floating_point() or not ids.numel() or ids.min() < 0 or ids.max() >= size:
            raise UserError(f"{self.folder / file}: {key!r} must be ids (rows, length) from 0 to {size - 1}")
        if key == "x0" and "xt" in self.keys(file) and self.array(file, "xt").shape != ids.shape:
            raise UserError(f"{self.folder / file}: 'x0' and 'xt' must have one shape")
        return ids.long()

    def times(self, file: str) -> Tensor:
        """The array `t` of a .npz, one time in (0, 1] for each row of `xt`; marks it as used."""
        t = self.array(file, "t")
        if t.shape != self.ids(file, "xt").shape[:1] or not ((t > 0) & (t <= 1)).all():
            raise UserError(f"{self.folder / file}: 't' must be one time in (0, 1] for each row of 'xt'")
        return t.float()

    def keys(self, file: str) -> list[str]:
        """The names of the arrays in a .npz."""
        return list(self._read(file))

    def _read(self, file: str) -> dict[str, np.ndarray[Any, Any]]:
        if file not in self._arrays:
            try:
                with opened(self.folder / file) as raw, np.load(raw, allow_pickle=False) as content:
                    self._arrays[file] = dict(content)
            except (ValueError, TypeError, EOFError, struct.error, zlib.error, zipfile.BadZipFile):
                raise UserError(
                    f"{self.folder / file} cannot be read as the arrays of a .npz; is it damaged?"
                ) from None
        return self._arrays[file]

    def checkpoint(self, file: str) -> Path:
        """The path of a .ckpt; marks it as used."""
        self._used.add(file)
        return self.folder / file

    def unused(self) -> list[str]:
        """The files and entries of the folder that were not read."""
        unused = []
        names = {entry["key"]: f"{entry['name']} at {entry['t']}" for entry in self.transitions()}
        for path in sorted(self.folder.glob("*.*")):
            if path.suffix == ".ckpt" and path.name not in self._used:
                unused.append(path.name)
            if path.suffix == ".npz" and path.is_file():
                keys = [key for key in self.keys(path.name) if f"{path.name} {key}" not in self._used]
                unused += [f"{path.name}: {names.get(key, key)}" for key in keys if key not in ("x0", "xt", "t")]
        if not self.has("adlm_transitions.npz"):
            unused += [f"adlm_transitions.npz (missing): {name}" for name in names.values()]
        for section in ("adlm_losses", "baseline_losses"):
            keys = [key for key in self.section(section) if f"{section} {key}" not in self._used]
            unused += [f"golden.json {section}: {key}" for key in keys]
        return unused


def compare(folder: Path) -> ParityReport:
    """All comparisons that the folder has numbers for."""
    golden = Golden(folder)
    rows = [row for check in (_adlm, _schedule, _mdlm, _sedd, _d3pm, _ar) for row in check(golden)]
    if not rows:
        raise UserError(f"{folder} has nothing to compare: no adlm-tiny.ckpt with adlm_forward.npz, no mdlm-tiny.ckpt")
    return ParityReport(rows, golden.unused())


@torch.no_grad()
def _adlm(golden: Golden) -> Iterator[ParityRow]:
    file = "adlm_forward.npz"
    if not golden.has("adlm-tiny.ckpt", file):
        return
    published = read_checkpoint(golden.checkpoint("adlm-tiny.ckpt"))
    config = _config(golden, published, "adlm")
    network = network_of(config, published.weights)
    ours = network(golden.ids(file, "xt"))
    yield _largest_error("adlm denoiser_logits", ours, golden.array(file, "denoiser_logits"), LOGITS)
    yield from _anchor_masks(golden, file)
    yield from _losses(golden, config, network, file)
    yield from _transitions(golden, network)
    for file_name in ("adlm-tiny.ckpt", "adlm-tiny-legacy.ckpt", "adlm-tiny-official.ckpt"):
        if golden.has(file_name):
            yield from _checkpoint_format(golden, config, file_name)


def _checkpoint_format(golden: Golden, config: Config, file_name: str) -> Iterator[ParityRow]:
    """One of the three checkpoint formats, with its raw and its EMA weights."""
    published, mask_id = read_checkpoint(golden.checkpoint(file_name)), golden.vocabulary().mask_id
    for kind, weights, file in (
        ("raw", published.weights, "adlm_forward.npz"),
        ("ema", published.ema_weights, "adlm_forward_ema.npz"),
    ):
        if weights is not None and golden.has(file):
            network = network_of(config, weights)
            for part in ("anchor_logits", "log_prob"):
                ours = _output(network, golden.ids(file, "xt"), mask_id, part)
                yield _largest_error(f"{file_name} {kind} {part}", ours, golden.array(file, part), LOGITS)


def _anchor_masks(golden: Golden, file: str) -> Iterator[ParityRow]:
    x = golden.ids(file, "x0")
    for key in golden.keys(file):
        if found := re.fullmatch(r"anchor_mask_tau(\d{1,9})", key):
            ours = anchor_mask(x, int(found[1]), golden.vocabulary().size)
            yield _largest_error(f"anchor mask, tau {found[1]}", ours.float(), golden.array(file, key).float(), 0.0)


def _losses(golden: Golden, config: Config, network: AnchoredTransformer, file: str) -> Iterator[ParityRow]:
    x, noised = golden.ids(file, "x0"), NoisedBatch(golden.ids(file, "xt"), golden.times(file).double())
    for key in golden.section("adlm_losses"):
        if found := re.fullmatch(r"train_loss_tau(\d{1,9})_gamma(\d+(?:\.\d+)?(?:e-?\d+)?)", key):
            tau, gamma, progress = int(found[1]), float(found[2]), 1.0
        elif found := re.fullmatch(r"warmup_loss_step(\d+)_of_([1-9]\d*)_tau(\d{1,9})", key):
            tau, gamma, progress = int(found[3]), GAMMA, int(found[1]) / int(found[2])
        elif key == "val_loss":
            tau, gamma, progress = 0, 0.0, 1.0
        else:
            continue
        method = Adlm(replace(config, anchor=Anchor(gamma=gamma, tau=tau)))
        ours = method.loss_at(network, x, noised, progress=progress).mean
        theirs = golden.number("adlm_losses", key)
        yield _largest_error(f"adlm {key}", ours, theirs, LOSSES, relative=True)


def _transitions(golden: Golden, network: AnchoredTransformer) -> Iterator[ParityRow]:
    """The categorical distribution of one step of each sampler; the released samplers use alpha = 1 - t."""
    file, mask_id = "adlm_transitions.npz", golden.vocabulary().mask_id
    if not golden.has(file):
        return
    z = golden.ids(file, "xt")
    log_beliefs = _output(network, z, mask_id, "log_prob")
    for entry in golden.transitions():
        sampling, t = _sampling(entry), torch.tensor(entry["t"]).double()  # rounded to float32, as theirs
        grid = torch.stack([t, t - entry["dt"]])
        steps = sampler_of(sampling).steps(schedules.LogLinear(), grid, sampling)
        reveal, remask = steps.reveal[0], steps.remask[0]
        if sampling.sampler == "remdm-conf":
            minus_confidence, visible = golden.array(file, f"conf_{entry['t']}"), z != mask_id
            ceiling = remasking_ceiling(steps.alpha_s, steps.alpha_t)[0]
            remask = confident_remasking(-minus_confidence, visible, ceiling)
        if sampling.sampler == "remdm-loop":
            remask = _remask_at_loop_edge(entry["t"], float(t), reveal, remask, sampling)
        ours = transition(z, shape_everywhere(log_beliefs, z, sampling).double(), reveal, remask, mask_id)
        name = f"transition {entry['name']} at t = {entry['t']}"
        yield _largest_error(name, ours, golden.array(file, entry["key"]), PROBABILITIES)


def _remask_at_loop_edge(t: float, rounded: float, reveal: Tensor, remask: Tensor, sampling: Sampling) -> Tensor:
    """The remasking probability of the released code where t is exactly t_on or t_off.

    There the share of masks uses t rounded up to float32, which is above t_on, or above t_off; whether visible tokens
    are kept uses t itself. So at t_on visible tokens are resampled like masks, and at t_off they are kept.
    """
    if t <= sampling.t_on < rounded:
        return 1 - reveal
    return torch.zeros_like(remask) if t <= sampling.t_off < rounded else remask


def _sampling(entry: dict[str, Any]) -> Sampling:
    """The sampling config of a transition, from the names of the released code."""
    sampler: Any = "ancestral" if entry["name"].startswith("mdlm") else entry["name"]
    options = {option: entry[option] for option in ("eta", "t_on", "t_off", "alpha_on") if option in entry}
    return Sampling(sampler, top_p=entry.get("nucleus_p", 1.0), nucleus="published", **options)


def _schedule(golden: Golden) -> Iterator[ParityRow]:
    schedule = schedules.LogLinear(EPS)
    for key, ours in (("loglinear_sigma", schedules.sigma), ("loglinear_dsigma", schedules.sigma_prime)):
        if key in golden.section("adlm_losses") and golden.has("adlm_forward.npz"):
            t = golden.times("adlm_forward.npz")  # float32, as theirs: near t = 1 their sigma' loses precision
            theirs = golden.number("adlm_losses", key)
            yield _largest_error(key, ours(schedule, t), theirs, LOSSES, relative=True)


@torch.no_grad()
def _mdlm(golden: Golden) -> Iterator[ParityRow]:
    """MDLM in continuous time, and in T discrete steps, where the released loss has eps 0."""
    for path in sorted(golden.folder.glob("mdlm*-tiny.ckpt")):
        name = path.name.removesuffix("-tiny.ckpt")
        steps = re.fullmatch(r"mdlm(?:_T(\d+))?", name)
        file = f"{name}_loss.npz"
        if steps is None or not golden.has(file):
            continue
        published = read_checkpoint(golden.checkpoint(path.name))
        config = _config(golden, published, "mdlm")
        t, s = golden.times(file), None
        if steps[1]:
            config = replace(config, schedule=Schedule(eps=0.0), time=Time(steps=int(steps[1])))
            t, s = _their_step(t, int(steps[1]))
        method = Mdlm(config)
        noised = NoisedBatch(golden.ids(file, "xt"), t.double(), s)
        loss = method.loss_at(network_of(method.config, published.weights), golden.ids(file, "x0"), noised)
        yield from _baseline(golden, name, file, loss, loss.nats)


@torch.no_grad()
def _sedd(golden: Golden) -> Iterator[ParityRow]:
    file = "sedd_loss.npz"
    if golden.has("sedd-tiny.ckpt", file):
        published = read_checkpoint(golden.checkpoint("sedd-tiny.ckpt"))
        method = Sedd(_time_conditioned_config(golden, published, "sedd"))
        noised = NoisedBatch(golden.ids(file, "xt"), golden.times(file).double())
        loss = method.loss_at(network_of(method.config, published.weights), golden.ids(file, "x0"), noised)
        yield from _baseline(golden, "sedd", file, loss, loss.nats, SCORE_ENTROPIES)


@torch.no_grad()
def _d3pm(golden: Golden) -> Iterator[ParityRow]:
    """1,000 steps; alpha has eps 0, while the conditioning sigma has the published eps."""
    file = "d3pm_loss.npz"
    if golden.has("d3pm-tiny.ckpt", file):
        published = read_checkpoint(golden.checkpoint("d3pm-tiny.ckpt"))
        config = _time_conditioned_config(golden, published, "d3pm")
        exact = replace(config, schedule=Schedule(eps=0.0), model=replace(config.model, time_conditioning=False))
        method = D3pm(replace(exact, time=Time(steps=D3PM_STEPS)))
        times = golden.times(file)
        t, s = _their_step(times, D3PM_STEPS)
        sigma = schedules.sigma(schedules.LogLinear(EPS), _grid_time(times, D3PM_STEPS)).float()
        network = network_of(method.config, published.weights)
        loss = method.loss_at(network, golden.ids(file, "x0"), NoisedBatch(golden.ids(file, "xt"), t, s), sigma=sigma)
        yield from _baseline(golden, "d3pm", file, loss, loss.nats)


@torch.no_grad()
def _ar(golden: Golden) -> Iterator[ParityRow]:
    file = "ar_forward.npz"
    if golden.has("ar-tiny.ckpt", file):
        published = read_checkpoint(golden.checkpoint("ar-tiny.ckpt"))
        method = Ar(_config(golden, published, "ar"))
        network, x = network_of(method.config, published.weights), golden.ids(file, "x0")
        ours = subs(network(x), torch.full_like(x, golden.vocabulary().mask_id), golden.vocabulary().mask_id)
        yield _largest_error("ar log_prob", ours, golden.array(file, "log_prob"), LOGITS)
        loss = method.loss(network, x, None, 1.0, BatchRng(torch.Generator()))
        yield from _baseline(golden, "ar", file, loss, loss.nats[:, 1:])


def _baseline(
    golden: Golden, name: str, file: str, loss: Loss, nats: Tensor, tolerance: float = LOSSES
) -> Iterator[ParityRow]:
    yield _largest_error(f"{name} nats a token", nats, golden.array(file, "nlls"), tolerance, relative=True)
    if name in golden.section("baseline_losses"):
        theirs = golden.number("baseline_losses", name)
        yield _largest_error(f"{name} loss", loss.mean, theirs, tolerance, relative=True)


def _their_step(t: Tensor, steps: int) -> tuple[Tensor, Tensor]:
    """The step (t, s) of the released code for a sampled time: the next grid time, at most 1 - 1e-4."""
    clamped = _grid_time(t, steps).clamp(max=1 - 1e-4)
    return clamped, clamped - 1 / steps


def _grid_time(t: Tensor, steps: int) -> Tensor:
    return ((t * steps).int() + 1).double() / steps


def _config(golden: Golden, published: PublishedCheckpoint, method: MethodName) -> Config:
    vocabulary = golden.vocabulary()
    if vocabulary.size != published.num_symbols:
        raise UserError(
            f"{golden.folder}: golden.json says {vocabulary.size} symbols, the weights have {published.num_symbols}"
        )
    return Config(
        method=method,
        vocabulary=vocabulary,
        model=published.model,
        schedule=Schedule(eps=EPS),
        data=Data(pad="attended"),
    )


def _time_conditioned_config(golden: Golden, published: PublishedCheckpoint, method: MethodName) -> Config:
    config = _config(golden, published, method)
    return replace(config, model=replace(config.model, time_conditioning=True))


def _output(network: AnchoredTransformer, z: Tensor, mask_id: int, part: str) -> Tensor:
    return network.anchor_logits(z) if part == "anchor_logits" else subs(network(z), z, mask_id)


def _largest_error(name: str, ours: Tensor, theirs: Tensor, tolerance: float, relative: bool = False) -> ParityRow:
    """The largest difference; a relative one is divided by the largest of their values, unless all of those are 0.

    For log 0 the released code has -1,000,000 (AR: -1,000) and we have -inf; these count as equal.
    """
    if ours.shape != theirs.shape:
        raise UserError(f"{name}: the golden numbers have shape {tuple(theirs.shape)}, ours {tuple(ours.shape)}")
    ours, theirs = ours.double(), theirs.double()
    same = (ours == -torch.inf) & (theirs < -900)
    difference = (ours - theirs).abs()
    if relative and theirs.any():
        difference = difference / theirs.abs().max()
    return ParityRow(name, difference.masked_fill(same, 0.0).max().item(), tolerance, relative)
