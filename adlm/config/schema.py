"""Every knob of a run, its default and a sentence about it. Knows nothing of files, tensors or networks.

The defaults are ours where the paper leaves a choice; the presets `owt/...` and `lm1b/...` set what was published.
Types and ranges are in the annotations, for `load.check`; what ties two knobs together is in `__post_init__`, which
leaves alone what is not even of the right type: `load.check` has the better sentence.
"""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from annotated_types import Ge, Gt, Le, Lt

from adlm.errors import UserError

MethodName = Literal["adlm", "mdlm", "sedd", "d3pm", "ar", "a2r"]
ScheduleName = Literal["log-linear", "linear", "cosine", "cosine-squared", "geometric"]
BridgeName = Literal["logits", "hidden", "mixture"]
StartName = Literal["published", "neighbours"]
PackingName = Literal["packed", "packed-published", "padded", "padded-published", "cropped"]
SamplerName = Literal[
    "ancestral",
    "remdm-cap",
    "remdm-rescale",
    "remdm-conf",
    "remdm-loop",
    "forward-backward",
    "dfm",
    "analytic",
    "semi-autoregressive",
    "left-to-right",
    "confidence",
    "margin",
    "entropy",
    "threshold",
    "anchor-first",
]

ETA = {"remdm-cap": 0.04, "remdm-rescale": 0.05, "remdm-loop": 0.02}  # the samplers that take one, and their own

MOST_STEPS_BY_CONFIDENCE = 20_000  # some 5 s without a change; other samplers pass over such steps at once

SOURCES = ("name", "path", "hub")  # the knobs of `data` that say what is read

LARGEST = 2**31 - 1  # of what is only counted: beyond it, a slip of the finger
Count = Annotated[int, Ge(1), Le(LARGEST)]
CountOrZero = Annotated[int, Ge(0), Le(LARGEST)]
Width = Annotated[int, Ge(1), Le(2**20)]
Depth = Annotated[int, Ge(1), Le(1024)]
Seed = Annotated[int, Ge(0), Lt(2**63)]
Share = Annotated[float, Ge(0), Le(1)]
Rate = Annotated[float, Ge(0)]


def _numbers(*values: object) -> bool:
    return all(isinstance(value, (int, float)) for value in values)


@dataclass(frozen=True)
class Vocabulary:
    """The size of the alphabet and the ids with a meaning, as `tokens.py` settles them from a tokenizer."""

    size: Annotated[int, Ge(2), Le(LARGEST)]
    """Number of symbols V, the mask included."""
    mask_id: Annotated[int, Ge(0)]
    """The mask m; never a clean token."""
    bos_id: Annotated[int, Ge(0)] | None = None
    """Opens a block; empty where the tokenizer has none."""
    eos_id: Annotated[int, Ge(0)] | None = None
    """Ends a document; empty where the tokenizer has none."""
    pad_id: Annotated[int, Ge(0)] | None = None
    """Fills a short row; it enters no loss and no count."""

    def __post_init__(self) -> None:
        if not _numbers(
            self.size, *(value for value in (self.mask_id, self.bos_id, self.eos_id, self.pad_id) if value)
        ):
            return
        for name in ("mask_id", "bos_id", "eos_id", "pad_id"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < self.size:
                raise UserError(
                    f"vocabulary.{name} {value} is outside the vocabulary of {self.size} symbols; "
                    f"give an id from 0 to {self.size - 1}, or a larger vocabulary.size"
                )
        for name in ("bos_id", "eos_id", "pad_id"):
            if getattr(self, name) == self.mask_id:
                raise UserError(
                    f"vocabulary.{name} {self.mask_id} is the mask id too; the mask must be a symbol of its own"
                )

    @property
    def num_clean(self) -> int:
        """Number of symbols that text can hold: all but the mask."""
        return self.size - 1


@dataclass(frozen=True)
class Data:
    """What is read (one of name, path and hub says so), and how it becomes rows of `length` tokens."""

    name: str = ""
    """A corpus by name, such as openwebtext or lm1b: `adlm prepare --list` shows them all."""
    path: str = ""
    """Own text: a file, a folder or a glob of .txt .jsonl .json .csv .tsv .parquet (also .gz .xz .bz2 .zst .zip)."""
    hub: str = ""
    """Any dataset of the Hugging Face hub: owner/name, or owner/name:subset."""
    root: str = ""
    """A folder where named corpora lie as local files; empty means the environment variable ADLM_DATA."""
    field: str = "text"
    """Where a record holds its text; several are joined by a space (title,body); a number is a nameless column."""
    boundary: Literal["file", "line", "blank"] = "file"
    """Where a document of plain text ends: with its file, at every line, or at blank lines."""
    held_out: Annotated[float, Ge(0), Lt(1)] = 0.01
    """Share of your own text kept for validation: documents by a draw for each, or its end where they are too few."""
    seed: Seed = 0
    """Which documents those are, and which problems are made up."""
    problems: CountOrZero = 0
    """Problems made up for the training split of prosqa and prontoqa, by `seed`; 0 reads the file, if there is one."""
    damaged: Literal["refuse", "replace"] = "refuse"
    """What becomes of bytes that are no UTF-8, and of NUL: the text is refused, or they turn into U+FFFD."""
    packing: PackingName | None = None
    """How documents become rows; empty means as is usual for the corpus, and packed for your own text."""
    pad: Literal["masked", "attended"] = "masked"
    """Whether the network sees padding: masked hides it, attended is what the released code does."""
    dtype: Literal["auto", "uint16", "uint32"] = "auto"
    """How an id is stored: auto takes two bytes where the vocabulary fits."""
    prepared: str = ""
    """A folder that `adlm prepare` made, to train from; empty lets a run prepare the text itself, into its data/."""
    streaming: bool = False
    """Tokenise while training, in the order of the source, instead of preparing shards once."""

    def __post_init__(self) -> None:
        given = [f"data.{knob} {getattr(self, knob)}" for knob in SOURCES if getattr(self, knob)]
        if len(given) > 1:
            raise UserError(f"{' and '.join(given)} both say what is read; keep one")


@dataclass(frozen=True)
class Schedule:
    """How the chance alpha_t that a token is still visible falls from t = 0 to t = 1."""

    name: ScheduleName = "log-linear"
    """The curve; log-linear is alpha_t = 1 - (1 - eps) t."""
    eps: Annotated[float, Ge(0), Lt(1)] = 0.0
    """What is still visible at t = 1 (log-linear and both cosines); the released code trains with 1e-3."""
    sigma_min: Rate = 1e-4
    """Noise -log alpha at t = 0 (linear and geometric)."""
    sigma_max: Annotated[float, Gt(0)] = 1.0
    """Noise -log alpha at t = 1 (linear and geometric)."""

    def __post_init__(self) -> None:
        if not _numbers(self.sigma_min, self.sigma_max):
            return
        if self.name == "geometric" and self.sigma_min <= 0:
            raise UserError(
                f"schedule.sigma_min {self.sigma_min} is not positive, and a geometric curve cannot leave 0; try 1e-4"
            )
        if self.name in ("linear", "geometric") and self.sigma_max <= self.sigma_min:
            raise UserError(
                f"schedule.sigma_max {self.sigma_max} must exceed schedule.sigma_min {self.sigma_min}: "
                "noise grows with t"
            )


@dataclass(frozen=True)
class Time:
    """Which times the objective looks at."""

    steps: CountOrZero = 0
    """T of the discrete-time bound; 0 is continuous time."""
    t_min: Annotated[float, Ge(0), Lt(1)] = 1e-3
    """Training draws t from [t_min, 1] in continuous time; the bound always looks at (0, 1]."""
    antithetic: bool = True
    """One time from each of B equal strata of a batch, instead of B independent times."""
    sigma: Share = 0.0
    """Remasking the discrete-time bound is for, cut at the ceiling of each step; 0 is ancestral sampling."""

    def __post_init__(self) -> None:
        if _numbers(self.sigma, self.steps) and self.sigma > 0 and self.steps == 0:
            raise UserError(
                f"time.sigma {self.sigma} needs discrete time, and time.steps is 0; set time.steps, say to 1000"
            )


@dataclass(frozen=True)
class Model:
    """The networks. Sizes by name: model=tiny, model=small, model=medium."""

    hidden: Width = 768
    """Width d."""
    blocks: Depth = 12
    """Transformer blocks of the (anchor) network."""
    heads: Width = 12
    """Attention heads; each is hidden / heads wide."""
    denoiser_blocks: Annotated[int, Ge(0), Le(1024)] | None = None
    """Blocks of the second network; empty means half of `blocks` but at least 1, 0 leaves the first network alone."""
    bridge: BridgeName = "logits"
    """What the second network reads of the first: raw logits (as published), hidden state, or expected embedding."""
    condition: Width = 128
    """Width of the time condition that modulates the norms."""
    time_conditioning: bool = False
    """Whether the network is told the noise sigma_t; if not, it is told 0."""
    dropout: Annotated[float, Ge(0), Lt(1)] = 0.1
    """Share of each residual update that is dropped in training."""
    start: StartName = "published"
    """How modulated blocks begin: doing nothing, as published, or with open gates and heads that look at neighbours."""

    def __post_init__(self) -> None:
        if not _numbers(self.hidden, self.heads) or self.heads < 1:
            return
        pairs = 2 * self.heads  # the halves of a head are rotated against each other, so its width is even
        if self.hidden % pairs:
            raise UserError(
                f"model.hidden {self.hidden} is not a multiple of twice model.heads {self.heads}; "
                f"try model.hidden={pairs * max(1, round(self.hidden / pairs))}"
            )

    @property
    def num_denoiser_blocks(self) -> int:
        """Blocks of the second network, with the default of half the first one's filled in."""
        return max(1, self.blocks // 2) if self.denoiser_blocks is None else self.denoiser_blocks


@dataclass(frozen=True)
class Anchor:
    """The anchor term of the ANELBO."""

    gamma: Rate = 3e-3
    """Weight of the anchor term; 0 leaves the plain bound."""
    tau: CountOrZero = 5
    """A token is an anchor where its id occurs at most tau times in its own sequence."""
    positions: Literal["all", "masked"] = "all"
    """Where anchors are scored: everywhere, as the released code does, or where masked, as Theorem 4.1 has it."""
    warm_up: bool = True
    """Let gamma grow with the share of training done: min(gamma, progress)."""


@dataclass(frozen=True)
class Train:
    """The recipe."""

    steps: Count = 1_000_000
    """Optimiser steps."""
    batch_size: Count = 512
    """Sequences a step, over all processes."""
    learning_rate: Annotated[float, Gt(0)] = 3e-4
    """Of AdamW, after the warm-up."""
    beta1: Annotated[float, Ge(0), Lt(1)] = 0.9
    """Decay of AdamW's mean."""
    beta2: Annotated[float, Ge(0), Lt(1)] = 0.999
    """Decay of AdamW's square."""
    epsilon: Annotated[float, Gt(0)] = 1e-8
    """AdamW's floor under the root."""
    weight_decay: Rate = 0.0
    """AdamW's decoupled decay."""
    clip: Rate = 1.0
    """Largest gradient norm; 0 does not clip."""
    warm_up_steps: CountOrZero | None = None
    """Steps over which the learning rate rises from 0; empty means a tenth of `steps`, but at most 2500."""
    decay: Literal["constant", "cosine", "linear", "trapezoid"] = "constant"
    """The learning rate after the warm-up; trapezoid holds it, and falls in a line over the last two fifths."""
    ema: Annotated[float, Ge(0), Lt(1)] = 0.9999
    """Largest decay of the averaged weights: min(ema, (1 + n) / (10 + n)) after n updates; 0 keeps no average."""
    bridge_rate: Rate = 1.0
    """Learning rate of the bridge, as a multiple of the others'."""
    unigram_start: bool = False
    """Let the biases of the heads begin at the log frequencies of the training text, not at 0, as published."""
    seed: Seed = 0
    """Every draw of a run belongs to it."""
    micro_batch: Count | None = None
    """Sequences a process passes through the network at once; fewer need less memory; empty means all of its share."""
    replicate: Count | None = None
    """Copies of the weights that the processes hold between them; empty means as many as there are processes for."""
    shard: Count = 1
    """Processes that split one copy of weights, averages and moments among them; 1 leaves each a whole copy."""
    recompute: bool = False
    """Keep only each block's input and run it again for the gradient: less memory, about a third more work."""
    precision: Literal["auto", "float32", "bfloat16", "float64"] = "auto"
    """Of products in the network (weights stay float32); auto is bfloat16 on a GPU, float32 else; float64 for tests."""
    compile: Literal["auto", "on", "off"] = "auto"
    """torch.compile of the networks: auto on a GPU, if it works there."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the network runs; auto is a GPU where there is one."""
    threads: Count | None = None
    """CPU threads of a run on a CPU; empty means OMP_NUM_THREADS, or as many as CPUs are idle; resuming keeps them."""
    log_every: Count = 50
    """Steps between two lines of metrics.jsonl and of the console."""
    valid_every: CountOrZero = 1_000
    """Steps between two measurements of the bound on held-out rows; 0 measures at the end only."""
    valid_rows: Count = 512
    """Held-out rows that are measured, always the same with the same draws; fewer where there are fewer."""
    sample_every: CountOrZero = 5_000
    """Steps between two files of sample texts, in the run's samples/; 0 writes none."""
    samples: Annotated[int, Ge(1), Le(1024)] = 2
    """Texts in such a file."""
    snapshot_every: Count = 1_000
    """Steps between two snapshots to resume from; one is also made at the end and when the run is told to stop."""
    keep: Count = 2
    """Snapshots kept: the last so many, and the one with the lowest bound on held-out rows."""
    skip_limit: CountOrZero = 10
    """Steps in a row whose loss or gradient is not finite that are skipped; one more ends the run."""
    tensorboard: bool = False
    """Write events for TensorBoard too, to the run's tensorboard/; needs the package tensorboard."""
    wandb: Literal["off", "offline", "online"] = "off"
    """Log to Weights & Biases too, on this machine only or on theirs; needs the package wandb."""

    @property
    def num_warm_up_steps(self) -> int:
        """`warm_up_steps`, with the default filled in."""
        return min(2_500, self.steps // 10) if self.warm_up_steps is None else self.warm_up_steps


@dataclass(frozen=True)
class Sampling:
    """How a canvas of masks becomes text."""

    sampler: SamplerName = "ancestral"
    """Which places change at a step; docs/sampling.md has them all."""
    steps: Annotated[int, Ge(1), Le(1_000_000)] = 128
    """Steps T of the walk from t = 1 to t_end; threshold, and ar and a2r, take as many as they need."""
    eta: Share | None = None
    """Strength of remasking of remdm-cap, -rescale and -loop; empty is 0.04, 0.05 and 0.02."""
    t_on: Share = 0.55
    """remdm-loop: where the loop of remasking begins."""
    t_off: Share = 0.05
    """remdm-loop: where the loop ends."""
    alpha_on: Annotated[float, Gt(0), Lt(1)] = 0.9
    """remdm-loop: the share of visible tokens that the loop keeps."""
    threshold: Annotated[float, Gt(0), Le(1)] = 0.9
    """threshold: a token is revealed where the belief in it reaches this; the likeliest always."""
    stride: CountOrZero = 0
    """semi-autoregressive: by how many tokens the window moves; 0 is half the model's length."""
    t_end: Annotated[float, Ge(0), Lt(1)] = 0.0
    """Where the walk ends; 0 reveals everything by draws, the released code stops at 1e-5."""
    final: Literal["argmax", "draw"] = "argmax"
    """What becomes of a token still masked at t_end."""
    temperature: Rate = 1.0
    """Beliefs are raised to the power of its inverse; 0 takes the likeliest token."""
    top_k: CountOrZero = 0
    """Tokens are drawn from the k likeliest; 0 is all."""
    top_p: Annotated[float, Gt(0), Le(1)] = 1.0
    """Tokens are drawn from the likeliest that together have this probability; 1 is all."""
    nucleus: Literal["crossing", "published"] = "crossing"
    """The token with which the sum passes top_p: kept, as Hugging Face does, or dropped, as the released code does."""
    repetition_penalty: Annotated[float, Ge(1)] = 1.0
    """The belief in a token that its row shows already is raised to this power; 1 is off."""

    def __post_init__(self) -> None:
        if _numbers(self.temperature) and self.temperature != 0 and not 1e-3 <= self.temperature <= 1e3:
            raise UserError(
                f"sampling.temperature {self.temperature} must be from 0.001 to 1000, or 0 for the likeliest token"
            )
        if self.sampler == "remdm-conf" and _numbers(self.steps) and self.steps > MOST_STEPS_BY_CONFIDENCE:
            raise UserError(
                f"sampling.steps {self.steps} must be at most {MOST_STEPS_BY_CONFIDENCE:,} with sampling.sampler "
                "remdm-conf, which draws at every step whether anything changes or not; lower it, or try remdm-cap"
            )
        if self.eta is not None and _numbers(self.eta) and self.eta > 0 and self.sampler not in ETA:
            raise UserError(
                f"sampling.eta {self.eta} is the strength of remasking, and sampling.sampler {self.sampler} does not "
                f"take one; try sampling.sampler={next(iter(ETA))}"
            )
        if self.sampler != "remdm-loop" or not _numbers(self.t_on, self.t_off, self.alpha_on):
            return
        if not 0 < self.t_off < self.t_on < 1:
            raise UserError(
                f"sampling.t_off {self.t_off} and sampling.t_on {self.t_on} must have 0 < t_off < t_on < 1: the loop "
                "runs from t_on down to t_off"
            )
        ceiling = (1 - self.alpha_on) / self.alpha_on if 0 < self.alpha_on < 1 else 1.0
        if _numbers(self.strength) and self.strength > ceiling:
            raise UserError(
                f"sampling.eta {self.strength} is above (1 - alpha_on) / alpha_on = {ceiling:.4g}: the loop would mask "
                "more tokens than it can reveal; lower sampling.eta or sampling.alpha_on"
            )

    @property
    def strength(self) -> float:
        """eta, or the sampler's own where it is empty."""
        return ETA.get(self.sampler, 0.0) if self.eta is None else self.eta


@dataclass(frozen=True)
class Config:
    """One run, whole: the resolved form is saved beside every model and is itself a preset."""

    method: MethodName = "adlm"
    """The objective and its networks."""
    tokenizer: str = "gpt2"
    """A name, a tokenizer.json, a folder, a vocab.txt, text8, bytes, or bpe-SIZE: learnt from the text itself."""
    length: Annotated[int, Ge(2), Le(2**24)] = 1024
    """Tokens in a row, L; at least 2, so that one token can tell of another."""
    vocabulary: Vocabulary | None = None
    """Size and special ids; empty until a tokenizer settles them."""
    data: Data = field(default_factory=Data)
    schedule: Schedule = field(default_factory=Schedule)
    time: Time = field(default_factory=Time)
    model: Model = field(default_factory=Model)
    anchor: Anchor = field(default_factory=Anchor)
    train: Train = field(default_factory=Train)
    sampling: Sampling = field(default_factory=Sampling)

    def __post_init__(self) -> None:
        if (
            not isinstance(self.schedule, Schedule)
            or not isinstance(self.model, Model)
            or not _numbers(self.schedule.eps)
        ):
            return
        ends_visible = self.schedule.name in ("linear", "geometric") or 1 - (1 - self.schedule.eps) > 0
        if self.model.time_conditioning and not ends_visible:
            raise UserError(
                f"model.time_conditioning true needs a finite noise at t = 1, and schedule.eps {self.schedule.eps} "
                "makes -log alpha_1 infinite; try schedule.eps=1e-3"
            )
