"""Every config option of a run, with its default and description. Independent of files, tensors and networks.

The defaults are ours where the paper leaves a choice; the presets `owt/...` and `lm1b/...` set the published values.
Types and ranges are in the annotations and are checked by `load.from_mapping`. Constraints between options are checked
in `__post_init__`, which skips values of the wrong type because `load.from_mapping` reports those more precisely.
"""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from annotated_types import Ge, Gt, Le, Lt

from adlm.errors import UserError
from adlm.registry import ANCHOR_RULES, BRIDGES, METHODS, SAMPLERS, SCHEDULES

MethodName = Annotated[str, METHODS]
ScheduleName = Annotated[str, SCHEDULES]
BridgeName = Annotated[str, BRIDGES]
SamplerName = Annotated[str, SAMPLERS]
AnchorRuleName = Annotated[str, ANCHOR_RULES]
ChainTarget = Literal["text", "causal"]
StartName = Literal["published", "neighbours"]
FormatName = Literal["text", "pairs"]
PackingName = Literal["packed", "packed-published", "padded", "padded-published", "cropped", "pairs"]

ETA = {"remdm-cap": 0.04, "remdm-rescale": 0.05, "remdm-loop": 0.02}  # built-in samplers that take eta: its default

MAX_STEPS_REMDM_CONF = 20_000  # about 5 s of steps that change nothing; the other samplers skip such steps

FAMILY_OPTIONS: dict[str, tuple[object, tuple[str, ...]]] = {
    "qk_norm": (False, ("published",)),
    "time_conditioning": (False, ("published",)),
    "start": ("published", ("published",)),
    "kv_heads": (None, ("llama",)),
    "rotary_base": (1e4, ("llama",)),
    "norm_epsilon": (1e-5, ("llama",)),
    "qkv_bias": (False, ("llama",)),
    "mlp": (None, ("llama", "gpt2")),
    "positions": (None, ("gpt2",)),
}
"""Options of `model` that only some families of networks have: their defaults, and the families."""

SOURCES = ("name", "path", "hub")  # the options of `data` that select what is read

LARGEST = 2**31 - 1  # upper bound of plain counts; a larger value is a typing error
Count = Annotated[int, Ge(1), Le(LARGEST)]
CountOrZero = Annotated[int, Ge(0), Le(LARGEST)]
Width = Annotated[int, Ge(1), Le(2**20)]
Depth = Annotated[int, Ge(1), Le(1024)]
Seed = Annotated[int, Ge(0), Lt(2**63)]
Share = Annotated[float, Ge(0), Le(1)]
Rate = Annotated[float, Ge(0)]


def _are_numbers(*values: object) -> bool:
    return all(isinstance(value, (int, float)) for value in values)


@dataclass(frozen=True)
class Vocabulary:
    """Vocabulary size and special token ids, as `tokens.py` derives them from a tokenizer."""

    size: Annotated[int, Ge(2), Le(LARGEST)]
    """Number of symbols V, including the mask."""
    mask_id: Annotated[int, Ge(0)]
    """Id of the mask token m, which never occurs in clean text."""
    bos_id: Annotated[int, Ge(0)] | None = None
    """Id at the start of each row; null if the tokenizer has none."""
    eos_id: Annotated[int, Ge(0)] | None = None
    """Id at the end of each document; null if the tokenizer has none."""
    pad_id: Annotated[int, Ge(0)] | None = None
    """Padding id of short rows; excluded from the loss and from token counts."""

    def __post_init__(self) -> None:
        if not _are_numbers(
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
                    f"vocabulary.{name} {self.mask_id} is the mask id too; the mask must be a separate symbol"
                )

    @property
    def num_clean(self) -> int:
        """Number of symbols that occur in clean text: all except the mask."""
        return self.size - 1

    @property
    def row_boundaries(self) -> tuple[list[int], list[int]]:
        """The ids before and after the text of a row: [bos] and [eos], or none if one of them is missing."""
        if self.bos_id is None or self.eos_id is None:
            return [], []
        return [self.bos_id], [self.eos_id]

    @property
    def padding_id(self) -> int:
        """The id at padded positions: pad_id, or any id other than the mask if there is none."""
        if self.pad_id is not None:
            return self.pad_id
        return 0 if self.mask_id != 0 else 1


@dataclass(frozen=True)
class Data:
    """The text to read (exactly one of name, path and hub), and how it becomes rows of `length` tokens."""

    name: str = ""
    """Name of a known corpus, such as openwebtext or lm1b; `adlm prepare --list` lists them."""
    path: str = ""
    """Your own text: a file, folder or glob of .txt .jsonl .json .csv .tsv .parquet (also .gz .xz .bz2 .zst .zip)."""
    hub: str = ""
    """A dataset on the Hugging Face Hub: owner/name or owner/name:subset."""
    root: str = ""
    """Folder with local copies of the named corpora; empty means the environment variable ADLM_DATA."""
    format: FormatName = "text"
    """What records hold: running text, or pairs (prompt and answer, or messages), whose loss is on answers alone."""
    field: str = "text"
    """Field with the text of a record; several (title,body) are joined by a space; a number selects a CSV column."""
    boundary: Literal["file", "line", "blank"] = "file"
    """What ends a document in plain text: the end of the file, every line, or blank lines."""
    held_out: Annotated[float, Ge(0), Lt(1)] = 0.01
    """Fraction of your own text held out for validation: random documents, or the end of the text if they are few."""
    seed: Seed = 0
    """Seed for choosing held-out documents and for generating problems."""
    problems: CountOrZero = 0
    """Number of training problems to generate for prosqa and prontoqa; 0 reads the training file, if there is one."""
    damaged: Literal["refuse", "replace"] = "refuse"
    """How to handle NUL and bytes that are not UTF-8: refuse the text, or replace them by U+FFFD."""
    packing: PackingName | None = None
    """How text is arranged in rows; null is the corpus's default (packed for your own); format pairs has its own."""
    pad: Literal["masked", "attended"] = "masked"
    """Whether attention sees padding: masked excludes it, attended includes it as the released code does."""
    dtype: Literal["auto", "uint16", "uint32"] = "auto"
    """Data type of stored token ids; auto is uint16 if the vocabulary fits, else uint32."""
    labels: Literal["none", "python"] = "none"
    """Tokens that a prepared folder labels for anchor.rule syntax: none, or the names and keywords of Python source."""
    prepared: str = ""
    """Folder of `adlm prepare` to train from, or several with weights (wiki=3,code=1); empty prepares RUN/data."""
    streaming: bool = False
    """Tokenise during training, in source order, instead of preparing shards first."""

    def __post_init__(self) -> None:
        given = [f"data.{option} {getattr(self, option)}" for option in SOURCES if getattr(self, option)]
        if len(given) > 1:
            raise UserError(f"{' and '.join(given)} both select the text to read; keep one")
        if self.packing == "pairs" and self.format == "text":
            raise UserError("data.packing pairs is for data.format pairs, and data.format is text; leave it out")
        if self.format == "pairs" and self.streaming is True:
            raise UserError("data.streaming true is for running text; data.format pairs needs data.streaming=false")
        if self.labels != "none" and self.format == "pairs":
            raise UserError(f"data.labels {self.labels} is for running text; data.format pairs needs data.labels=none")
        if self.labels != "none" and (self.name or self.hub):
            raise UserError(f"data.labels {self.labels} is for your own text; give data.path, or data.labels=none")
        if self.labels != "none" and self.streaming is True:
            raise UserError(f"data.labels {self.labels} is for prepared text; use data.streaming=false")


@dataclass(frozen=True)
class Schedule:
    """The noise schedule alpha_t: the probability that a token is unmasked at time t."""

    name: ScheduleName = "log-linear"
    """Noise schedule; log-linear is alpha_t = 1 - (1 - eps) t."""
    eps: Annotated[float, Ge(0), Lt(1)] = 0.0
    """Probability of being unmasked at t = 1 (log-linear, cosine, cosine-squared); the released code uses 1e-3."""
    sigma_min: Rate = 1e-4
    """Noise level sigma_t = -log alpha_t at t = 0 (linear and geometric)."""
    sigma_max: Annotated[float, Gt(0)] = 1.0
    """Noise level sigma_t = -log alpha_t at t = 1 (linear and geometric)."""

    def __post_init__(self) -> None:
        if not _are_numbers(self.sigma_min, self.sigma_max):
            return
        if self.name == "geometric" and self.sigma_min <= 0:
            raise UserError(
                f"schedule.sigma_min {self.sigma_min} is not positive, which schedule.name geometric requires; try 1e-4"
            )
        if self.name in ("linear", "geometric") and self.sigma_max <= self.sigma_min:
            raise UserError(
                f"schedule.sigma_max {self.sigma_max} must exceed schedule.sigma_min {self.sigma_min}: "
                "the noise level grows with t"
            )


@dataclass(frozen=True)
class Time:
    """The times t at which the training objective is evaluated."""

    steps: CountOrZero = 0
    """Number of steps T of the discrete-time bound; 0 is continuous time."""
    t_min: Annotated[float, Ge(0), Lt(1)] = 1e-3
    """Continuous-time training samples t from [t_min, 1]; the reported bound always covers (0, 1]."""
    t_max: Annotated[float, Gt(0), Le(1)] = 1.0
    """Continuous-time training samples t up to t_max; below 1 it leaves the noisiest texts out of training."""
    antithetic: bool = True
    """Stratified times: one t from each of B equal intervals per batch, instead of B independent times."""
    masks: Literal["independent", "counted"] = "independent"
    """independent masks each token with its own draw; counted masks exactly ceil(t L): the same bound, less noise."""
    power: Annotated[float, Ge(1), Le(4)] = 1.0
    """Training samples t = u^power for uniform u, with importance weights; above 1, more rows have few masks."""
    weight: Literal["bound", "one"] = "bound"
    """Training weight of a masked token: bound is w(t), one is 1 at every t; reported nats keep the bound's weight."""
    sigma: Share = 0.0
    """Remasking probability assumed by the discrete-time bound, clipped at each step's maximum; 0 is ancestral."""

    def __post_init__(self) -> None:
        if _are_numbers(self.t_min, self.t_max) and self.t_max <= self.t_min:
            raise UserError(f"time.t_max {self.t_max} must be above time.t_min {self.t_min}", "time.t_max")
        if _are_numbers(self.t_max, self.steps) and self.t_max < 1 and (self.steps or self.masks == "counted"):
            kind = "time.masks counted draws" if self.masks == "counted" else f"time.steps {self.steps} draws"
            raise UserError(f"time.t_max {self.t_max} limits the times of training, and {kind} them itself; use 1.0")
        if _are_numbers(self.sigma, self.steps) and self.sigma > 0 and self.steps == 0:
            raise UserError(f"time.sigma {self.sigma} needs discrete time, and time.steps is 0; try time.steps=1000")
        if _are_numbers(self.steps, self.power) and self.steps and self.continuous_options:
            name = next(iter(self.continuous_options))
            raise UserError(
                f"time.{name} {getattr(self, name)} needs continuous time, and time.steps is {self.steps}; use "
                "time.steps=0"
            )

    @property
    def continuous_options(self) -> dict[str, object]:
        """The options set that only adlm and mdlm in continuous time have, and their defaults."""
        defaults: dict[str, object] = {"masks": "independent", "weight": "bound", "power": 1}
        return {name: default for name, default in defaults.items() if getattr(self, name) != default}


@dataclass(frozen=True)
class Rates:
    """How soon tokens are revealed: an order that is a part of the model, of adlm and mdlm (docs/theory.md)."""

    rule: Literal["none", "position", "anchors", "tokens", "text"] = "none"
    """Rates of tokens in training: by position, of anchors, learnt for each id, or learnt by a network that reads x."""
    strength: Annotated[float, Gt(0)] = 4.0
    """position: the first token's rate over that of the last; anchors: rate of anchors (anchor.rule) over others'."""
    gradient: Literal["whole", "next"] = "whole"
    """tokens and text: the whole gradient of the bound, or only that of the next step: less noise, a bad order."""
    blocks: Depth = 1
    """text: blocks of the network that reads the clean text; training and the bound need it, sampling does not."""


@dataclass(frozen=True)
class Model:
    """The networks. Presets of sizes: model=tiny, small, medium, 1b, 3b, 7b."""

    hidden: Width = 768
    """Hidden size d."""
    blocks: Depth = 12
    """Number of transformer blocks; for adlm and a2r, those of the anchor network."""
    heads: Width = 12
    """Number of attention heads; the head dimension is hidden / heads."""
    denoiser_blocks: Annotated[int, Ge(0), Le(1024)] | None = None
    """Blocks of the denoiser after the anchor network; null is max(1, blocks // 2), 0 uses the anchor network alone."""
    bridge: BridgeName = "logits"
    """Input of the denoiser from the anchor network: logits as published; docs/theory.md describes the others."""
    bridge_start: Literal["random", "identity"] = "random"
    """Initialisation of the bridges logits, hidden and hidden-plus-input: identity passes the hidden states on."""
    tie_heads: bool = False
    """Share one output matrix between the heads of the anchor network and the denoiser; each has its own bias."""
    second_anchor_head: Annotated[int, Ge(0), Le(1024)] = 0
    """Blocks of the anchor network before a second anchor head, which has the same loss and no other use; 0 is none."""
    qk_norm: bool = False
    """Normalise queries and keys of each head (RMSNorm with learnt weights) before the rotary embedding."""
    family: Literal["published", "llama", "gpt2"] = "published"
    """Kind of blocks: published, or without time conditioning llama (as SmolLM2, TinyLlama and Qwen2) and gpt2."""
    kv_heads: Width | None = None
    """family llama: number of key and value heads, each shared by heads / kv_heads query heads; null is heads."""
    mlp: Width | None = None
    """families llama and gpt2: inner width of the MLP; null is 4 * hidden."""
    positions: Width | None = None
    """family gpt2: number of learnt positions, the largest length; it must be given."""
    rotary_base: Annotated[float, Gt(1)] = 10_000.0
    """family llama: the rotary embedding turns by rotary_base^(-2i / head dimension) radians per token."""
    norm_epsilon: Annotated[float, Gt(0)] = 1e-5
    """family llama: epsilon of RMSNorm, added to the mean square."""
    qkv_bias: bool = False
    """family llama: whether queries, keys and values have a bias, as in Qwen2."""
    tie_embedding: bool = False
    """Share one matrix between the embedding and all heads; each head has its own bias."""
    condition: Width = 128
    """Width of the time embedding that modulates the layer norms (adaLN)."""
    time_conditioning: bool = False
    """Condition the network on the noise level sigma_t; if false, its time input is always 0."""
    dropout: Annotated[float, Ge(0), Lt(1)] = 0.1
    """Dropout probability of the residual updates."""
    block_length: CountOrZero = 0
    """adlm and mdlm: tokens of a text block, denoised from the clean text before it (block-causal); 0 is whole rows."""
    masked_keys: Literal["visible", "hidden"] = "visible"
    """Block-causal: whether masked places are visible to the others of their block; hidden with length 1 equals ar."""
    chain: CountOrZero = 0
    """Block-causal: width of a chain, which draws the tokens of a block one by one in a single call; 0 is none."""
    memory: bool = False
    """adlm and mdlm on whole rows: masks read what the network, of adlm the anchor network, made of them a call ago."""
    hole_id: Annotated[int, Ge(0)] | None = None
    """Block-causal: an id that no text has, to stand for missing tokens (train.infill); of SmolLM2 4 is such an id."""
    start: StartName = "published"
    """Initialisation: published starts every block as the identity; neighbours opens the gates and attends locally."""

    def __post_init__(self) -> None:
        if self.tie_heads is True and self.denoiser_blocks == 0:
            raise UserError("model.tie_heads true needs two heads, and model.denoiser_blocks 0 leaves one; drop either")
        if _are_numbers(self.second_anchor_head, self.blocks) and self.second_anchor_head >= self.blocks:
            raise UserError(
                f"model.second_anchor_head {self.second_anchor_head} must be below model.blocks {self.blocks}, after "
                f"which the first one stands; try model.second_anchor_head={self.blocks // 2}"
            )
        for option, (default, families) in FAMILY_OPTIONS.items():
            if (value := getattr(self, option)) != default and self.family not in families:
                raise UserError(
                    f"model.{option} {value} is an option of model.family {' and '.join(families)}, and model.family "
                    f"is {self.family}; drop one of them"
                )
        if self.family == "gpt2" and self.positions is None:
            raise UserError("model.family gpt2 learns its positions; give their number, such as model.positions=1024")
        if not _are_numbers(self.hidden, self.heads) or self.heads < 1:
            return
        if isinstance(self.kv_heads, int) and self.kv_heads >= 1 and self.heads % self.kv_heads:
            raise UserError(f"model.heads {self.heads} is not a multiple of model.kv_heads {self.kv_heads}")
        pairs = 2 * self.heads  # the rotary embedding rotates pairs of channels, so the head dimension is even
        if self.hidden % pairs:
            raise UserError(
                f"model.hidden {self.hidden} is not a multiple of twice model.heads {self.heads}; "
                f"try model.hidden={pairs * max(1, round(self.hidden / pairs))}"
            )

    @property
    def num_denoiser_blocks(self) -> int:
        """Number of denoiser blocks: `denoiser_blocks`, or its default if that is None."""
        return max(1, self.blocks // 2) if self.denoiser_blocks is None else self.denoiser_blocks

    @property
    def num_kv_heads(self) -> int:
        """Number of key and value heads: `kv_heads`, or its default if that is None."""
        return self.heads if self.kv_heads is None else self.kv_heads

    @property
    def mlp_width(self) -> int:
        """Inner width of the MLP: `mlp`, or its default if that is None."""
        return 4 * self.hidden if self.mlp is None else self.mlp


@dataclass(frozen=True)
class Anchor:
    """The anchor term of the ANELBO."""

    gamma: Rate = 3e-3
    """Weight of the anchor term in the ANELBO; 0 leaves the plain bound."""
    rule: AnchorRuleName = "count"
    """Which tokens are anchors; docs/theory.md describes the rules."""
    tau: CountOrZero = 5
    """rule count: a token is an anchor if its id occurs at most tau times in its sequence, as published."""
    share: Share = 0.15
    """rules rare, frequent, tf-idf and random: the fraction of the tokens that are anchors."""
    pattern: str = ""
    """rule pattern: a regular expression that the text of a token must match as a whole, such as law|order."""
    positions: Literal["all", "masked"] = "all"
    """Positions in the anchor loss: all, as in the released code, or only masked ones, as in Theorem 4.1."""
    warm_up: bool = True
    """Warm up the anchor weight: min(gamma, fraction of training completed)."""
    until: Share = 1.0
    """The fraction of training after which the anchor term is left out; 1, as published, keeps it to the end."""


@dataclass(frozen=True)
class Train:
    """Optimisation, distribution over processes, logging and checkpoints."""

    steps: Count = 1_000_000
    """Number of optimizer steps."""
    batch_size: Count = 512
    """Sequences per optimizer step, over all processes."""
    optimizer: Literal["adamw", "muon"] = "adamw"
    """adamw as published; muon orthogonalizes the updates of the matrices in the blocks, the rest stays with AdamW."""
    learning_rate: Annotated[float, Gt(0)] = 3e-4
    """Peak learning rate, reached after the warm-up."""
    beta1: Annotated[float, Ge(0), Lt(1)] = 0.9
    """AdamW beta1, the decay of the first moment."""
    beta2: Annotated[float, Ge(0), Lt(1)] = 0.999
    """AdamW beta2, the decay of the second moment."""
    epsilon: Annotated[float, Gt(0)] = 1e-8
    """AdamW epsilon, added to the denominator."""
    weight_decay: Rate = 0.0
    """Decoupled weight decay."""
    clip: Rate = 1.0
    """Maximum gradient norm; 0 disables clipping."""
    warm_up_steps: CountOrZero | None = None
    """Steps of linear learning-rate warm-up from 0; null is a tenth of `steps`, at most 2500."""
    decay: Literal["constant", "cosine", "linear", "trapezoid"] = "constant"
    """Learning rate after the warm-up; trapezoid is constant, then falls linearly over the last two fifths."""
    ema: Annotated[float, Ge(0), Lt(1)] = 0.9999
    """EMA decay of the weights: min(ema, (1 + n) / (10 + n)) after n updates; 0 disables the EMA."""
    bridge_rate: Rate = 1.0
    """Learning rate of the bridge, as a multiple of train.learning_rate."""
    planner: Rate = 0.0
    """Whole rows: extra weight of masks whose token the network, of adlm the anchor network, expects; 0 is none."""
    planner_temperature: Annotated[float, Gt(0)] = 1.0
    """train.planner: masks share it in proportion to the probability of their token, to the power 1 / temperature."""
    memory_share: Share = 0.5
    """model.memory: share of the training rows that have a memory, made in a first pass without gradient."""
    causal_weight: Rate = 0.0
    """Block-causal: weight of the next-token loss of the clean copy; above 0 the model can check its own drafts."""
    chain_rate: Rate = 1.0
    """Learning rate of the chain, as a multiple of train.learning_rate."""
    chain_weight: Rate = 1.0
    """Weight of the chain's loss, in blocks that are masked as a whole; it has none without model.chain."""
    chain_target: ChainTarget = "text"
    """What the chain learns: the tokens of the text, or the predictions of the clean copy, which checks its drafts."""
    align_weight: Rate = 0.0
    """Block-causal: weight of 1 - cosine of the noisy and the clean copy's hidden states, over layers and masks."""
    random_blocks: bool = False
    """Block-causal: let text blocks begin anywhere: the first has a random length, the same for all rows of a batch."""
    random_length: Share = 0.0
    """Share of the training rows cut to a random length, as a shorter canvas has; for methods that read whole rows."""
    infill: Share = 0.0
    """Block-causal: the share of training rows rearranged as a text with holes and then the text filled in."""
    unigram_start: bool = False
    """Initialise the output biases to the log unigram frequencies of the training text, instead of 0 as published."""
    lora_rank: Annotated[int, Ge(0), Le(2**20)] = 0
    """Rank of LoRA, which trains W + lora_scale B A for frozen matrices W of the model `init`; 0 trains all weights."""
    lora_scale: Annotated[float, Gt(0)] = 1.0
    """Factor of the low-rank updates B A."""
    lora_norms: bool = False
    """Also train the weights of the norms with LoRA."""
    lora_dtype: Literal["float32", "bfloat16"] = "float32"
    """Data type of the adapter in RUN/model: float32, or bfloat16 at half the size."""
    base_sha256: str = ""
    """With LoRA, sha256 of the frozen weights; filled in when the model `init` is opened."""
    seed: Seed = 0
    """Seed of all random numbers of the run."""
    micro_batch: Count | None = None
    """Sequences per forward pass of a process (gradient accumulation); null is the process's whole share."""
    shard: Count = 1
    """Number of processes that shard one replica of weights, EMA and moments (FSDP); 1 only replicates them."""
    recompute: bool = False
    """Recompute the activations of the blocks in the backward pass: less memory, about a third more computation."""
    precision: Literal["auto", "float32", "bfloat16", "float8", "float64"] = "auto"
    """Of products, not weights. auto: bfloat16 on a GPU, else float32; float8: 8 bits in blocks; float64: for tests."""
    compile: Literal["auto", "on", "off"] = "auto"
    """Use torch.compile on the networks; auto uses it on a GPU if it works there."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of the network; auto is a GPU if there is one."""
    threads: Annotated[int, Ge(1), Le(1024)] | None = None
    """CPU threads; null is OMP_NUM_THREADS, or the number of idle CPUs; a resumed run keeps its number."""
    log_every: Count = 50
    """Steps between log lines in metrics.jsonl and on the console."""
    valid_every: CountOrZero = 1_000
    """Steps between evaluations of the bound on held-out rows; 0 evaluates at the end only."""
    valid_rows: Count = 512
    """Maximum number of held-out rows per evaluation; the rows and random numbers are the same every time."""
    sample_every: CountOrZero = 5_000
    """Steps between files of sampled texts in the run's samples/; one is also written at the end; 0 writes none."""
    samples: Annotated[int, Ge(1), Le(1024)] = 2
    """Number of texts in each of these files."""
    checkpoint_every: Count = 1_000
    """Steps between checkpoints to resume from; one is also written at the end and when the run is stopped."""
    keep: Count = 2
    """Number of latest checkpoints kept, besides the one with the lowest bound on held-out rows."""
    skip_limit: CountOrZero = 10
    """Maximum number of consecutive steps skipped because of a non-finite loss or gradient; one more ends the run."""
    tensorboard: bool = False
    """Also write TensorBoard events to the run's tensorboard/; needs the package tensorboard."""
    wandb: Literal["off", "offline", "online"] = "off"
    """Also log to Weights & Biases, locally (offline) or to the server (online); needs the package wandb."""

    @property
    def num_warm_up_steps(self) -> int:
        """Number of warm-up steps: `warm_up_steps`, or its default if that is None."""
        return min(2_500, self.steps // 10) if self.warm_up_steps is None else self.warm_up_steps


@dataclass(frozen=True)
class Sampling:
    """How samples are drawn from a canvas of masks."""

    sampler: SamplerName = "ancestral"
    """Sampling algorithm; docs/sampling.md describes them."""
    steps: Annotated[int, Ge(1), Le(1_000_000)] = 128
    """Number of sampling steps T from t = 1 to t_end; threshold, ar and a2r take as many as they need."""
    eta: Share | None = None
    """Remasking strength of remdm-cap, remdm-rescale and remdm-loop; null is 0.04, 0.05 and 0.02 respectively."""
    t_on: Share = 0.55
    """remdm-loop: time t at which the remasking loop starts."""
    t_off: Share = 0.05
    """remdm-loop: time t at which the remasking loop ends."""
    alpha_on: Annotated[float, Gt(0), Lt(1)] = 0.9
    """remdm-loop: fraction of unmasked tokens during the loop."""
    threshold: Annotated[float, Gt(0), Le(1)] = 0.9
    """threshold: reveal every token with at least this probability, and always the most probable one."""
    stride: CountOrZero = 0
    """semi-autoregressive: tokens by which the window advances; 0 is half the model's length."""
    t_end: Annotated[float, Ge(0), Lt(1)] = 0.0
    """Time t at which sampling stops; 0 reveals every token by sampling, the released code stops at 1e-5."""
    final: Literal["argmax", "draw"] = "argmax"
    """How tokens still masked at t_end are revealed: most probable token, or a sample."""
    temperature: Rate = 1.0
    """Softmax temperature; 0 is greedy."""
    top_k: CountOrZero = 0
    """Sample from the k most probable tokens; 0 disables it."""
    top_p: Annotated[float, Gt(0), Le(1)] = 1.0
    """Nucleus sampling: sample from the most probable tokens with this total probability; 1 disables it."""
    nucleus: Literal["crossing", "published"] = "crossing"
    """Whether the token that crosses top_p is kept (crossing, as in Hugging Face) or dropped (published)."""
    repetition_penalty: Annotated[float, Ge(1)] = 1.0
    """Raise the probability of tokens already in the row to this power; 1 disables it."""
    no_repeat: CountOrZero = 0
    """Never draw a token with which so many tokens in a row would occur a second time (not sedd, d3pm); 0 never."""
    anchor_every: Count = 1
    """adlm: the anchor network runs at every k-th step of a row or block, the denoiser at all; in training too."""
    drafts: CountOrZero | None = None
    """speculative: tokens drafted in a call; null is block_length - 1 on a GPU and 0 elsewhere; same distribution."""
    verify: bool = True
    """speculative: draw the causal model's distribution; false keeps all drafts: faster, and it needs model.chain."""
    drafter: Literal["denoiser", "anchor"] = "denoiser"
    """speculative: what drafts; the anchor network of adlm is a part of the network, so its drafts cost less."""
    candidates: Annotated[int, Ge(1), Le(256)] = 1
    """Block-causal infilling: fills drawn for a hole, of which one is kept, mostly one that the text after it fits."""
    stop_at_eos: bool = False
    """Models that write from left to right: end a text at its first end-of-text token, which fills the rest of it."""

    def __post_init__(self) -> None:
        if _are_numbers(self.temperature) and self.temperature != 0 and not 1e-3 <= self.temperature <= 1e3:
            raise UserError(
                f"sampling.temperature {self.temperature} must be from 0.001 to 1000, or 0 for greedy sampling",
                "sampling.temperature",
            )
        if self.sampler == "remdm-conf" and _are_numbers(self.steps) and self.steps > MAX_STEPS_REMDM_CONF:
            raise UserError(
                f"sampling.steps {self.steps} must be at most {MAX_STEPS_REMDM_CONF:,} with sampling.sampler "
                "remdm-conf, which samples at every step even if nothing changes; lower it, or try remdm-cap",
                "sampling.steps",
            )
        takes_eta = self.sampler in ETA or self.sampler not in SAMPLERS.built_in
        if self.eta is not None and _are_numbers(self.eta) and self.eta > 0 and not takes_eta:
            raise UserError(
                f"sampling.eta {self.eta} is a remasking strength, which sampling.sampler {self.sampler} does not "
                f"take; try sampling.sampler={next(iter(ETA))}",
                "sampling.eta",
            )
        if self.sampler != "remdm-loop" or not _are_numbers(self.t_on, self.t_off, self.alpha_on):
            return
        if not 0 < self.t_off < self.t_on < 1:
            raise UserError(
                f"sampling.t_off {self.t_off} and sampling.t_on {self.t_on} must have 0 < t_off < t_on < 1: the loop "
                "runs from t_on down to t_off",
                "sampling.t_off",
            )
        ceiling = (1 - self.alpha_on) / self.alpha_on if 0 < self.alpha_on < 1 else 1.0
        if _are_numbers(self.strength) and self.strength > ceiling:
            raise UserError(
                f"sampling.eta {self.strength} is above (1 - alpha_on) / alpha_on = {ceiling:.4g}: the loop would mask "
                "more tokens than it can reveal; lower sampling.eta or sampling.alpha_on",
                "sampling.eta",
            )

    @property
    def strength(self) -> float:
        """Remasking strength: `eta`, or the sampler's default if that is None."""
        return ETA.get(self.sampler, 0.0) if self.eta is None else self.eta


@dataclass(frozen=True)
class Reason:
    """Fine-tuning a causal language model to solve problems (`adlm reason`): what stands before the answer."""

    method: Literal["no-cot", "cot", "pause", "icot", "coconut", "coconut-pause", "acot"] = "acot"
    """Reasoning method; docs/reasoning.md describes them."""
    base: str = ""
    """Model to fine-tune: a Hugging Face name or folder, a .gguf file or an ar run; empty trains `model` anew."""
    slots: CountOrZero = 6
    """Slots between question and answer in the last stage."""
    epochs: Count = 50
    """Epochs after the first stage, over all stages."""
    first_epochs: CountOrZero = 0
    """Epochs of a first stage of plain chain of thought, for the methods with stages."""
    stage_epochs: Count = 5
    """Epochs of each stage; the last one takes those that remain."""
    slots_a_stage: Count = 1
    """Slots that each stage adds."""
    remove_steps: bool | None = None
    """acot: whether one reasoning step is removed with each slot; null does so on prosqa, as published."""
    tokens_a_stage: Count = 8
    """icot: tokens of the reasoning that each stage removes."""
    anchor_weight: Rate = 1.0
    """acot: weight of the cross-entropy of the anchor labels."""
    reset_optimizer: bool = True
    """Start the optimizer anew at every stage."""
    misfits: Literal["refuse", "keep"] = "refuse"
    """Problems without steps, more steps than slots, labels of several tokens: an error, or kept (first token)."""
    max_tokens: Count = 128
    """Largest number of tokens that are generated for a problem."""


@dataclass(frozen=True)
class Config:
    """All options of one run. The resolved config is saved with every model and can be used as a preset."""

    method: MethodName = "adlm"
    """Training objective and network architecture."""
    tokenizer: str = "gpt2"
    """A name, tokenizer.json, folder, vocab.txt, text8, bytes, box, bpe-SIZE (trained on the text), or base:MODEL."""
    init: str = ""
    """Model to start from, with its network: box, smollm2, a run, a base (smollm2-base, .gguf, folder, owner/name)."""
    length: Annotated[int, Ge(2), Le(2**24)] = 1024
    """Tokens per row, L; at least 2, so that tokens have context."""
    vocabulary: Vocabulary | None = None
    """Vocabulary size and special ids; null until a tokenizer is loaded."""
    data: Data = field(default_factory=Data)
    schedule: Schedule = field(default_factory=Schedule)
    time: Time = field(default_factory=Time)
    model: Model = field(default_factory=Model)
    anchor: Anchor = field(default_factory=Anchor)
    rates: Rates = field(default_factory=Rates)
    train: Train = field(default_factory=Train)
    sampling: Sampling = field(default_factory=Sampling)
    reason: Reason | None = None
    """Set for reasoning runs (`adlm reason`), null for language modelling."""

    def __post_init__(self) -> None:
        if (
            not isinstance(self.schedule, Schedule)
            or not isinstance(self.model, Model)
            or not _are_numbers(self.schedule.eps)
        ):
            return
        positions = self.model.positions
        if _are_numbers(positions, self.length) and positions < self.length:  # type: ignore[operator]
            raise UserError(f"length {self.length} is more than the {positions} learnt positions (model.positions)")
        eps_is_last_alpha = self.schedule.name in ("log-linear", "cosine", "cosine-squared")
        if self.model.time_conditioning and eps_is_last_alpha and 1 - (1 - self.schedule.eps) <= 0:
            raise UserError(
                "model.time_conditioning true needs a finite noise level at t = 1, and schedule.eps "
                f"{self.schedule.eps} makes -log alpha_1 infinite; try schedule.eps=1e-3"
            )
        if isinstance(self.time, Time) and self.time.masks == "counted":
            if self.schedule.name != "log-linear" or self.schedule.eps != 0:
                raise UserError(
                    f"time.masks counted needs the log-linear schedule with eps 0, and schedule.name "
                    f"{self.schedule.name} has schedule.eps {self.schedule.eps}; try schedule=log-linear"
                )
            if isinstance(self.data, Data) and self.data.pad == "attended":
                raise UserError(
                    "time.masks counted counts masks of the text, and data.pad attended masks padding too; "
                    "use data.pad=masked"
                )
        if (
            isinstance(self.train, Train)
            and isinstance(self.data, Data)
            and _are_numbers(self.train.random_length)
            and self.train.random_length > 0
            and self.data.pad == "attended"
        ):
            raise UserError(
                f"train.random_length {self.train.random_length} pads rows after their text, and a shorter canvas has "
                "no padding to attend to; use data.pad=masked"
            )
