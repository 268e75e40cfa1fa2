"""The models of the arena: one list, grouped by the question that a group answers. No training, no results.

A row is a preset and overrides, later ones winning; with a seed it is a trial, one training run. Groups come in order
of importance, and within a group the first seeds of all rows come before the second ones.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

TOKENIZERS = {"bpe-8192": 8192, "gpt2": 50_258, "bpe-2048": 2048, "bytes": 258}
"""Symbols of each tokenizer, the mask included."""

# 256 rows x 256 tokens = 65,536 tokens a step; 1,000 steps are 65.5M tokens, 1.5 epochs of 200 MB of Wikipedia. The
# learning rate stays constant and the bounds are those of the EMA, so a point of a curve is where a run of that many
# steps would have ended: that makes comparisons at equal seconds fair. (The published gamma warms up, but reaches 3e-3
# after 0.3% of the steps.)
SCREENING = (
    *("data.packing=packed", "length=256", "model.hidden=512", "model.heads=8", "model.dropout=0"),
    *("train.steps=1000", "train.batch_size=256", "train.learning_rate=1e-3", "train.warm_up_steps=100"),
    *("train.decay=constant", "train.ema=0.995", "train.unigram_start=true", "train.log_every=50"),
    *("train.valid_every=100", "train.valid_rows=512", "train.checkpoint_every=1000000", "train.keep=1"),
    *("train.sample_every=0", "train.samples=1", "sampling.steps=16"),
)
# 81.9M tokens: fewer than 330 MB of Wikipedia and books have
ONCE = (*SCREENING, "train.steps=1250")
# As many tokens as SCREENING, with a rate that decays
CAUSAL = (
    *("data.packing=packed", "length=256", "model.dropout=0", "train.unigram_start=true"),
    *("train.steps=1000", "train.batch_size=256", "train.learning_rate=1e-3", "train.warm_up_steps=100"),
    *("train.decay=trapezoid", "train.ema=0.995", "train.log_every=50", "train.checkpoint_every=1000000"),
    *("train.valid_every=0", "train.sample_every=0", "train.samples=1", "train.keep=1"),
)
# The paper's small size. 128 rows x 512 tokens = 65,536 tokens a step; 800 steps are 52.4M tokens, 1.4 epochs of
# 170 MB of Wikipedia: 2.5 to 3 minutes on an H200. The learning rate falls to 0 over the last 280 steps.
FINALS = (
    *("data.packing=packed", "length=512", "model.hidden=768", "model.heads=12", "model.dropout=0"),
    *("train.steps=800", "train.batch_size=128", "train.learning_rate=1e-3", "train.warm_up_steps=100"),
    *("train.decay=trapezoid", "train.ema=0.995", "train.unigram_start=true", "train.log_every=50"),
    *("train.valid_every=100", "train.valid_rows=256", "train.checkpoint_every=1000000", "train.keep=1"),
    *("train.sample_every=0", "train.samples=1", "sampling.steps=16"),
)
# The presets quickstart/adlm and quickstart/mdlm, for a CPU: 800 steps of 32 rows x 64 tokens, a rate that decays
QUICKSTART = (
    *("schedule.eps=0", "train.threads=1", "train.device=cpu", "train.checkpoint_every=1000000"),
    *("train.samples=1", "sampling.steps=8"),
)
SMOKE = (
    *("data.packing=packed", "length=32", "model.hidden=32", "model.heads=2", "model.condition=8", "model.dropout=0"),
    *("train.steps=8", "train.batch_size=8", "train.warm_up_steps=2", "train.decay=constant", "train.log_every=2"),
    *("train.valid_every=4", "train.valid_rows=16", "train.sample_every=0", "train.samples=1", "train.keep=1"),
    *("train.checkpoint_every=1000000", "train.threads=1", "sampling.steps=4"),
)


@dataclass(frozen=True)
class Row:
    """A model, trained with one or more seeds."""

    name: str
    """Unique among all groups."""
    title: str
    preset: str
    overrides: tuple[str, ...]
    seeds: tuple[int, ...] = (0,)


@dataclass(frozen=True)
class Group:
    """Rows that answer a question."""

    question: str
    common: tuple[str, ...]
    """Overrides of all rows, before their own."""
    rows: tuple[Row, ...]
    against: tuple[str, ...]
    """Names of the rows, of any group with the same `common`, that the others are compared with."""
    tokenizer: str = "bpe-8192"
    """Of the prepared text, a name in TOKENIZERS."""
    only_by_name: bool = False
    """Not among the groups that `run` takes by default: its text is another one than theirs."""


@dataclass(frozen=True)
class Trial:
    """One training run."""

    group: str
    row: Row
    seed: int

    @property
    def common(self) -> tuple[str, ...]:
        return GROUPS[self.group].common

    @property
    def tokenizer(self) -> str:
        return GROUPS[self.group].tokenizer

    @property
    def key(self) -> str:
        return key_of(self.row.name, self.seed)

    def overrides(self, extra: Sequence[str] = ()) -> list[str]:
        """The arguments of `adlm train`, without the text and the run folder."""
        return [self.row.preset, *self.common, *self.row.overrides, f"train.seed={self.seed}", *extra]


def key_of(name: str, seed: int) -> str:
    return f"{name}-seed{seed}"


def trials_of(name: str) -> Iterator[Trial]:
    """The trials of a group, in order."""
    group = GROUPS[name]
    for seed in sorted({seed for row in group.rows for seed in row.seeds}):
        yield from (Trial(name, row, seed) for row in group.rows if seed in row.seeds)


def rows_by_name() -> dict[str, Row]:
    return {row.name: row for group in GROUPS.values() for row in group.rows}


THREE, FIVE = (0, 1, 2), (0, 1, 2, 3, 4)
DIFFUSION = ("schedule.eps=0", "model.start=neighbours")
ANCHORED = (*DIFFUSION, "model.blocks=8", "model.denoiser_blocks=4")
STRONG = ("anchor.gamma=0.1", "anchor.warm_up=false")
EVERY_TOKEN = "anchor.rule=all"
IDENTITY = "model.bridge_start=identity"
RANDOM = ("anchor.rule=random", "anchor.share=0.828")  # tau 5 gives 82.8% of enwiki2014 at length 256, BPE of 8,192


def mdlm(name: str, title: str, *overrides: str, seeds: tuple[int, ...] = (0,)) -> Row:
    return Row(name, title, "owt/mdlm", (*DIFFUSION, "model.blocks=12", *overrides), seeds)


def adlm(name: str, title: str, *overrides: str, seeds: tuple[int, ...] = (0,)) -> Row:
    """8 + 4 blocks, hidden bridge, gamma 0.1 without warm-up, tau 5."""
    return Row(name, title, "owt/adlm", (*ANCHORED, "model.bridge=hidden", *STRONG, *overrides), seeds)


def auxiliary(name: str, title: str, *overrides: str, seeds: tuple[int, ...] = (0,)) -> Row:
    """MDLM of 12 blocks with the same auxiliary loss after block 8."""
    return Row(name, title, "owt/adlm", (*ANCHORED, "model.bridge=none", *STRONG, *overrides), seeds)


def published(name: str, title: str, *overrides: str) -> Row:
    """8 + 4 blocks, logits bridge, gamma 3e-3 with warm-up; initialisation and recipe are those of the other rows."""
    return Row(name, title, "owt/adlm", (*ANCHORED, "model.bridge=logits", *overrides))


def released(rate: str) -> Row:
    """ADLM of 8 + 4 blocks as published in all but size, steps, EMA and eps (0 instead of 1e-3: one bound for all)."""
    sizes = ("schedule.eps=0", "model.blocks=8", "model.denoiser_blocks=4")
    as_released = ("model.dropout=0.1", "train.unigram_start=false", f"train.learning_rate={rate}", OFTEN)
    return Row(f"released-{rate}", f"ADLM as released, learning rate {rate}", "owt/adlm", (*sizes, *as_released))


def a2r(name: str, title: str, *overrides: str, seeds: tuple[int, ...] = (0,)) -> Row:
    """A causal pair of 8 + 4 blocks."""
    sizes = ("model.blocks=8", "model.denoiser_blocks=4", "model.hidden=512", "model.heads=8")
    return Row(name, title, "owt/a2r", (*sizes, *overrides), seeds)


def ar(name: str, title: str, *overrides: str, seeds: tuple[int, ...] = (0,)) -> Row:
    return Row(name, title, "owt/ar", ("model.blocks=12", "model.heads=8", *overrides), seeds)


SEDD = Row("sedd-12", "SEDD, 12 blocks", "owt/sedd", ("model.start=neighbours", "model.blocks=12"))
AR_12 = ar("ar-12", "AR, 12 blocks")
HIDDEN_BRIDGE = ("model.bridge=hidden", "anchor.warm_up=false")
SPLITS = ((4, 8), (6, 6), (10, 2))
SMALL = ("model.blocks=12", "model.denoiser_blocks=6")
OFTEN = "train.valid_every=25"
POWER = ("time.masks=counted", "time.power=2")
ADAMW, MUON = "train.optimizer=adamw", "train.optimizer=muon"
QUICK_MODELS = {
    "mdlm": ("quickstart/mdlm",),
    "adlm": ("quickstart/adlm", "model.bridge_start=random"),
    "auxiliary": ("quickstart/adlm", "model.bridge=none"),
}
"""Presets and overrides: 3 blocks, 1 + 2 blocks, and 3 blocks with the anchor loss after the first. t is above 0.1."""
COUNTED = ("time.masks=counted", "time.power=1.5")
QK_NORM = "model.qk_norm=true"
BEST_MUON = (MUON, "train.learning_rate=2e-3")
MODERN = (*BEST_MUON, OFTEN)
DECAY = (*MODERN, "train.decay=trapezoid")
MATCHED = ("model.hidden=544",)  # the parameters of ADLM, with 512
OF_15 = {rule: (f"anchor.rule={rule}", "anchor.share=0.15") for rule in ("rare", "random")}
# As many tokens and validations as the other rows, the same averaging in tokens
SMALL_BATCH = (
    *("train.batch_size=64", "train.steps=4000", "train.warm_up_steps=100", "train.ema=0.99875"),
    *("train.valid_every=50", "train.log_every=50"),
)


def of_rules() -> Iterator[Row]:
    for share in (0.05, 0.15, 0.3, 0.75):
        for rule in ("rare", "random", "frequent"):
            title = f"ADLM, {rule} {share:.0%}"
            yield adlm(f"adlm-{rule}-{share}", title, f"anchor.rule={rule}", f"anchor.share={share}")
    for rule in ("rare", "random"):
        title = f"MDLM 12 with auxiliary loss, {rule} 15%"
        yield auxiliary(f"auxiliary-{rule}-0.15", title, f"anchor.rule={rule}", "anchor.share=0.15")


def of_depths() -> Iterator[Row]:
    for blocks, denoiser_blocks in SPLITS:
        split = (f"model.blocks={blocks}", f"model.denoiser_blocks={denoiser_blocks}")
        yield adlm(f"adlm-{blocks}+{denoiser_blocks}", f"ADLM {blocks} + {denoiser_blocks}", *split)
        yield auxiliary(f"auxiliary-at-{blocks}", f"MDLM 12 with auxiliary loss after block {blocks}", *split)
    second = "model.second_anchor_head=4"
    yield adlm("adlm-two", "ADLM 8 + 4, a second anchor head after block 4", second)
    yield auxiliary("auxiliary-two", "MDLM 12 with auxiliary losses after blocks 4 and 8", second)


def of_rates() -> Iterator[Row]:
    for rate in ("3e-4", "2e-3"):
        word, of = f"train.learning_rate={rate}", f"learning rate {rate}"
        yield mdlm(f"mdlm-12-rate-{rate}", f"MDLM 12, {of}", word)
        yield adlm(f"adlm-rate-{rate}", f"ADLM, {of}", word)
        yield auxiliary(f"auxiliary-rate-{rate}", f"MDLM 12 with auxiliary loss, {of}", word)
        yield published(f"adlm-published-rate-{rate}", f"ADLM, published bridge and gamma, {of}", word)
        yield Row(f"sedd-12-rate-{rate}", f"SEDD 12, {of}", SEDD.preset, (*SEDD.overrides, word))
        yield ar(f"ar-12-rate-{rate}", f"AR 12, {of}", word)


def of_recipes() -> Iterator[Row]:
    """Validated every 25 steps, which takes 3% longer: a good recipe reaches the released bound early."""
    yield adlm("adlm-beta2-0.95", "ADLM, AdamW with beta2 0.95", "train.beta2=0.95", OFTEN)
    yield adlm("adlm-beta2-0.99", "ADLM, AdamW with beta2 0.99", "train.beta2=0.99", OFTEN)
    yield adlm("adlm-published-start", "ADLM, published initialisation", "model.start=published", OFTEN)
    yield adlm("adlm-no-unigrams", "ADLM, output biases start at 0", "train.unigram_start=false", OFTEN)
    yield adlm("adlm-counted", "ADLM, counted masks", "time.masks=counted", OFTEN)
    yield adlm("adlm-power-2", "ADLM, counted masks, t = u^2", *POWER, OFTEN)
    yield mdlm("mdlm-power-2", "MDLM 12, counted masks, t = u^2", *POWER, OFTEN)
    yield adlm("adlm-t-min", "ADLM, t above 0.1 only (another objective)", "time.t_min=0.1", OFTEN)
    yield adlm("adlm-qk-norm", "ADLM, normalised queries and keys", QK_NORM, OFTEN)
    yield mdlm("mdlm-muon-power-1.5", "MDLM 12, Muon 2e-3, counted masks, t = u^1.5", *BEST_MUON, *COUNTED, OFTEN)
    yield mdlm("mdlm-muon-qk-norm", "MDLM 12, Muon 2e-3, normalised queries and keys", *BEST_MUON, QK_NORM, OFTEN)
    short = (*MODERN, "train.warm_up_steps=25")
    yield mdlm("mdlm-muon-warm-up-25", "MDLM 12, Muon 2e-3, 25 steps of warm-up", *short, seeds=THREE)
    yield adlm("adlm-muon-warm-up-25", "ADLM, Muon 2e-3, 25 steps of warm-up", *short, IDENTITY, seeds=THREE)
    yield mdlm("mdlm-muon-64-rows", "MDLM 12, Muon 2e-3, batches of 64 rows", *BEST_MUON, *SMALL_BATCH)
    yield adlm("adlm-muon-64-rows", "ADLM, Muon 2e-3, batches of 64 rows", *BEST_MUON, IDENTITY, *SMALL_BATCH)
    yield from (released(rate) for rate in ("3e-4", "1e-3", "2e-3"))


def of_muon() -> Iterator[Row]:
    """Each family with several learning rates. The bridge of the pair starts as the identity."""
    for rate in ("1e-3", "2e-3", "4e-3"):
        words = (MUON, f"train.learning_rate={rate}", OFTEN)
        yield mdlm(f"mdlm-muon-{rate}", f"MDLM 12, Muon {rate}", *words, seeds=THREE)
        yield adlm(f"adlm-muon-{rate}", f"ADLM 8 + 4, Muon {rate}", *words, IDENTITY, seeds=THREE)
        yield auxiliary(f"auxiliary-muon-{rate}", f"MDLM 12 with auxiliary loss, Muon {rate}", *words, seeds=THREE)
    title = "MDLM, 12 blocks of 544: parameters of ADLM, Muon 2e-3"
    yield mdlm("mdlm-matched-muon-2e-3", title, *MATCHED, *MODERN, seeds=THREE)
    yield mdlm("mdlm-14-muon-2e-3", "MDLM, 14 blocks, Muon 2e-3", "model.blocks=14", *MODERN, seeds=THREE)
    pair = (*MODERN, IDENTITY)
    title = "ADLM, every token an anchor, Muon 2e-3"
    yield adlm("adlm-all-muon-2e-3", title, EVERY_TOKEN, *pair, seeds=THREE)
    for rule, chosen in OF_15.items():
        yield adlm(f"adlm-{rule}-muon-2e-3", f"ADLM, {rule} 15%, Muon 2e-3", *chosen, *pair, seeds=THREE)


def quick(model: str, name: str, title: str, *overrides: str) -> Row:
    """A model of the quickstart, with five seeds."""
    preset, *words = QUICK_MODELS[model]
    return Row(f"quick-{model}-{name}", f"{model}, {title}", preset, (*words, *overrides), FIVE)


def of_quickstarts() -> Iterator[Row]:
    for model in QUICK_MODELS:
        yield quick(model, "adamw", "AdamW 4e-3", ADAMW)
        for rate in ("2e-3", "4e-3", "8e-3"):
            yield quick(model, f"muon-{rate}", f"Muon {rate}", MUON, f"train.learning_rate={rate}")
    for optimizer, title in ((ADAMW, "AdamW"), (MUON, "Muon")):
        kind = title.lower()
        yield quick("mdlm", f"{kind}-all-times", f"{title} 4e-3, t above 0.001", optimizer, "time.t_min=1e-3")
        yield quick("mdlm", f"{kind}-t-min-0.2", f"{title} 4e-3, t above 0.2", optimizer, "time.t_min=0.2")
        for power in ("1", "1.5", "2"):
            words = (optimizer, "time.masks=counted", f"time.power={power}")
            yield quick("mdlm", f"{kind}-power-{power}", f"{title} 4e-3, counted masks, t = u^{power}", *words)
    yield quick("mdlm", "muon-wide", "Muon 4e-3, 80 wide: at least the parameters of ADLM", MUON, "model.hidden=80")
    yield quick("mdlm", "muon-qk-norm", "Muon 4e-3, normalised queries and keys", MUON, QK_NORM)
    for name, title, word in (
        ("published-start", "published initialisation", "model.start=published"),
        ("no-unigrams", "output biases start at 0", "train.unigram_start=false"),
        ("dropout", "dropout 0.1", "model.dropout=0.1"),
    ):
        yield quick("mdlm", f"muon-{name}", f"Muon 4e-3, {title}", MUON, word)
    for model in ("adlm", "auxiliary"):
        yield quick(model, "muon-until-0.3", "Muon 4e-3, anchor loss in the first 30% only", MUON, "anchor.until=0.3")
    yield quick("adlm", "muon-gamma-0", "Muon 4e-3, gamma 0", MUON, "anchor.gamma=0")
    yield quick("adlm", "muon-masked", "Muon 4e-3, anchor loss at masked positions", MUON, "anchor.positions=masked")
    identity = (MUON, IDENTITY)
    yield quick("adlm", "muon-identity", "Muon 4e-3, bridge starts as the identity", *identity)
    for rule in ("rare", "random", "frequent"):
        words = (*identity, f"anchor.rule={rule}", "anchor.share=0.15")
        yield quick("adlm", f"muon-identity-{rule}", f"Muon 4e-3, identity, {rule} 15%", *words)
    yield quick("adlm", "muon-identity-all", "Muon 4e-3, identity, every token an anchor", *identity, EVERY_TOKEN)
    words = (*identity, "train.learning_rate=8e-3")
    yield quick("adlm", "muon-identity-8e-3", "Muon 8e-3, bridge starts as the identity", *words)
    words = (*identity, "anchor.gamma=0")
    yield quick("adlm", "muon-identity-gamma-0", "Muon 4e-3, bridge starts as the identity, gamma 0", *words)
    words = (*identity, "train.bridge_rate=0.1")
    yield quick("adlm", "muon-identity-slow", "Muon 4e-3, bridge starts as the identity, its rate x 0.1", *words)
    short = "train.warm_up_steps=20"
    yield quick("mdlm", "muon-warm-up-20", "Muon 4e-3, 20 steps of warm-up instead of 60", MUON, short)
    yield quick("adlm", "muon-identity-warm-up-20", "Muon 4e-3, identity, 20 steps of warm-up", *identity, short)
    constant = "train.decay=constant"
    yield quick("mdlm", "muon-constant", "Muon 4e-3, constant rate", MUON, constant)
    yield quick("adlm", "muon-identity-constant", "Muon 4e-3, identity, constant rate", *identity, constant)
    tied = "model.tie_heads=true"
    yield quick("adlm", "muon-identity-tied", "Muon 4e-3, identity, heads tied", *identity, tied)
    yield quick("auxiliary", "muon-tied", "Muon 4e-3, heads tied", MUON, tied)
    for gamma in ("0.003", "0.03", "0.3", "1"):
        words = (*identity, f"anchor.gamma={gamma}")
        yield quick("adlm", f"muon-identity-gamma-{gamma}", f"Muon 4e-3, identity, gamma {gamma}", *words)
    words = (*identity, "model.blocks=2", "model.denoiser_blocks=1")
    yield quick("adlm", "muon-identity-2+1", "Muon 4e-3, identity, 2 + 1 blocks", *words)
    yield quick("adlm", "muon-mixture", "Muon 4e-3, mixture bridge", MUON, "model.bridge=mixture")
    logits = "model.bridge=logits"
    yield quick("adlm", "muon-logits", "Muon 4e-3, logits bridge", MUON, logits)
    yield quick("adlm", "muon-logits-identity", "Muon 4e-3, logits bridge starts as the identity", *identity, logits)
    plus_input = "model.bridge=hidden-plus-input"
    yield quick("adlm", "muon-plus-input", "Muon 4e-3, hidden-plus-input bridge", MUON, plus_input)
    words = (MUON, plus_input, "anchor.gamma=0")
    yield quick("adlm", "muon-plus-input-gamma-0", "Muon 4e-3, hidden-plus-input bridge, gamma 0", *words)


GROUPS = {
    "control": Group(
        "Is it anchoring, or supervising the middle of a network?",
        SCREENING,
        (
            mdlm("mdlm-12", "MDLM, 12 blocks", seeds=THREE),
            adlm("adlm", "ADLM 8 + 4, hidden bridge, gamma 0.1, tau 5", seeds=THREE),
            auxiliary("auxiliary", "MDLM 12 with the same auxiliary loss after block 8", seeds=THREE),
            adlm("adlm-all", "ADLM, every token an anchor", EVERY_TOKEN, seeds=THREE),
            auxiliary("auxiliary-all", "MDLM 12 with auxiliary loss, every token", EVERY_TOKEN, seeds=THREE),
            adlm("adlm-gamma-0", "ADLM, gamma 0", "anchor.gamma=0", seeds=THREE),
            adlm("adlm-random", "ADLM, as many random anchors as tau 5 gives", *RANDOM, seeds=THREE),
        ),
        ("mdlm-12", "auxiliary", "adlm"),
    ),
    "until": Group(
        "Does the anchor loss help at the beginning of training only?",
        SCREENING,
        (
            auxiliary(
                "auxiliary-until-0.3",
                "MDLM 12 with auxiliary loss in the first 30% of training",
                "anchor.until=0.3",
                seeds=THREE,
            ),
            adlm("adlm-until-0.3", "ADLM, anchor loss in the first 30% of training", "anchor.until=0.3"),
            auxiliary(
                "auxiliary-until-0.15",
                "MDLM 12 with auxiliary loss in the first 15% of training",
                "anchor.until=0.15",
            ),
        ),
        ("mdlm-12", "auxiliary"),
    ),
    "bridge": Group(
        "What does the bridge do?",
        SCREENING,
        (
            published("adlm-published", "ADLM, published bridge and gamma: logits, 3e-3 with warm-up"),
            published("adlm-published-gamma-0", "logits bridge, gamma 0", "anchor.gamma=0"),
            published(
                "adlm-published-slow",
                "published bridge and gamma, bridge learning rate x 0.01",
                "train.bridge_rate=0.01",
            ),
            adlm("adlm-identity", "ADLM, hidden bridge starts as the identity", IDENTITY, seeds=THREE),
            adlm("adlm-identity-gamma-0", "hidden bridge starts as the identity, gamma 0", IDENTITY, "anchor.gamma=0"),
            adlm("adlm-logits", "logits bridge, gamma 0.1", "model.bridge=logits"),
            adlm("adlm-logits-identity", "logits bridge starts as the identity", "model.bridge=logits", IDENTITY),
            adlm("adlm-mixture", "mixture bridge, gamma 0.1", "model.bridge=mixture"),
            adlm("adlm-plus-input", "hidden-plus-input bridge, gamma 0.1", "model.bridge=hidden-plus-input"),
        ),
        ("mdlm-12", "adlm"),
    ),
    "rule": Group("Does it matter which tokens are anchors?", SCREENING, tuple(of_rules()), ("mdlm-12", "adlm-all")),
    "gamma": Group(
        "How strong should the anchor loss be?",
        SCREENING,
        (
            adlm("adlm-gamma-3e-3", "ADLM, gamma 0.003", "anchor.gamma=3e-3"),
            adlm("adlm-gamma-3e-2", "ADLM, gamma 0.03", "anchor.gamma=3e-2"),
            adlm("adlm-gamma-0.3", "ADLM, gamma 0.3", "anchor.gamma=0.3"),
            adlm("adlm-gamma-1", "ADLM, gamma 1", "anchor.gamma=1"),
            auxiliary("auxiliary-gamma-3e-2", "MDLM 12 with auxiliary loss, gamma 0.03", "anchor.gamma=3e-2"),
            auxiliary("auxiliary-gamma-0.3", "MDLM 12 with auxiliary loss, gamma 0.3", "anchor.gamma=0.3"),
            auxiliary("auxiliary-gamma-1", "MDLM 12 with auxiliary loss, gamma 1", "anchor.gamma=1"),
        ),
        ("mdlm-12", "adlm", "adlm-gamma-0"),
    ),
    "positions": Group(
        "Should visible anchors be in the loss?",
        SCREENING,
        (
            adlm("adlm-masked", "ADLM, masked anchors only", "anchor.positions=masked"),
            adlm("adlm-all-masked", "ADLM, every masked token", EVERY_TOKEN, "anchor.positions=masked"),
            auxiliary("auxiliary-masked", "MDLM 12 with auxiliary loss, masked only", "anchor.positions=masked"),
        ),
        ("mdlm-12", "adlm", "adlm-all"),
    ),
    "depth": Group("Where should the anchor head be?", SCREENING, tuple(of_depths()), ("mdlm-12", "adlm", "auxiliary")),
    "size": Group(
        "What do depth, parameters and other methods give?",
        SCREENING,
        (
            mdlm("mdlm-matched", "MDLM, 12 blocks of 544: parameters of ADLM", *MATCHED),
            mdlm("mdlm-8", "MDLM, 8 blocks", "model.blocks=8"),
            adlm("adlm-tied", "ADLM, heads tied", "model.tie_heads=true"),
            auxiliary("auxiliary-tied", "MDLM 12 with auxiliary loss, heads tied", "model.tie_heads=true"),
            SEDD,
            AR_12,
        ),
        ("mdlm-12", "adlm"),
    ),
    "rate": Group("Is the learning rate right for each family?", SCREENING, tuple(of_rates()), ("mdlm-12", "adlm")),
    "muon": Group(
        "Does anchoring help with Muon?",
        SCREENING,
        tuple(of_muon()),
        ("mdlm-muon-2e-3", "adlm-muon-2e-3"),
    ),
    "decay": Group(
        "Is it the same with a learning rate that falls to 0, as in the finals?",
        SCREENING,
        (
            mdlm("mdlm-muon-decay", "MDLM 12, Muon 2e-3, decay", *DECAY, seeds=THREE),
            adlm("adlm-muon-decay", "ADLM 8 + 4, Muon 2e-3, decay", *DECAY, IDENTITY, seeds=THREE),
            auxiliary("auxiliary-muon-decay", "MDLM 12 with auxiliary loss, Muon 2e-3, decay", *DECAY, seeds=THREE),
            mdlm("mdlm-14-muon-decay", "MDLM, 14 blocks, Muon 2e-3, decay", "model.blocks=14", *DECAY, seeds=THREE),
        ),
        ("mdlm-muon-decay", "adlm-muon-decay"),
    ),
    "recipe": Group(
        "What lowers the bound per second without changing it?",
        SCREENING,
        tuple(of_recipes()),
        ("mdlm-12", "mdlm-muon-2e-3"),
    ),
    "a2r": Group(
        "Does anchoring help left to right?",
        CAUSAL,
        (
            ar("ar", "AR, 12 blocks of 512", "model.hidden=512", seeds=(0, 1)),
            a2r("a2r-0.1", "A2R, hidden bridge, gamma 0.1", *HIDDEN_BRIDGE, "anchor.gamma=0.1", seeds=(0, 1)),
            a2r("a2r-0", "A2R, hidden bridge, gamma 0", *HIDDEN_BRIDGE, "anchor.gamma=0", seeds=(0, 1)),
            a2r(
                "a2r-all",
                "A2R, hidden bridge, gamma 0.1, every token an anchor",
                *(*HIDDEN_BRIDGE, "anchor.gamma=0.1", "anchor.tau=256"),
            ),
            ar("ar-544", "AR, 12 blocks of 544: parameters of A2R, hidden bridge", "model.hidden=544"),
            a2r(
                "a2r-published",
                "A2R, logits bridge, gamma 0.003 (published)",
                *("model.bridge=logits", "anchor.gamma=3e-3"),
            ),
            a2r("a2r-0.003", "A2R, hidden bridge, gamma 0.003", *HIDDEN_BRIDGE, "anchor.gamma=3e-3"),
            a2r(
                "a2r-identity",
                "A2R, hidden bridge that starts as the identity, gamma 0.1",
                *HIDDEN_BRIDGE,
                IDENTITY,
                "anchor.gamma=0.1",
            ),
            ar("ar-560", "AR, 12 blocks of 560: parameters of A2R as published", "model.hidden=560"),
            a2r(
                "a2r-auxiliary",
                "AR 12 with the same auxiliary loss after block 8, gamma 0.1",
                *("model.bridge=none", "anchor.warm_up=false", "anchor.gamma=0.1"),
            ),
        ),
        ("ar", "ar-544"),
    ),
    "books": Group(
        "Is it the same on books? The text is another one than Wikipedia's.",
        SCREENING,
        (
            mdlm("books-mdlm-12", "books: MDLM, 12 blocks", *MODERN, seeds=THREE),
            adlm("books-adlm", "books: ADLM 8 + 4", *MODERN, IDENTITY, seeds=THREE),
            auxiliary("books-auxiliary", "books: MDLM 12 with the same auxiliary loss", *MODERN, seeds=THREE),
            mdlm("books-mdlm-matched", "books: MDLM, 12 blocks of 544", *MATCHED, *MODERN, seeds=THREE),
            *(
                adlm(f"books-adlm-{rule}", f"books: ADLM, {rule} 15%", *OF_15[rule], *MODERN, IDENTITY, seeds=THREE)
                for rule in OF_15
            ),
        ),
        ("books-mdlm-12", "books-adlm"),
        only_by_name=True,
    ),
    "once": Group(
        "Do the anchored models stay ahead on a text that is not repeated? Wikipedia and books in one text.",
        ONCE,
        (
            mdlm("once-mdlm-12", "once: MDLM, 12 blocks", *MODERN, seeds=THREE),
            auxiliary("once-auxiliary", "once: MDLM 12 with the same auxiliary loss", *MODERN, seeds=THREE),
            adlm("once-adlm", "once: ADLM 8 + 4", *MODERN, IDENTITY, seeds=THREE),
            mdlm("once-mdlm-matched", "once: MDLM, 12 blocks of 544", *MATCHED, *MODERN, seeds=THREE),
        ),
        ("once-mdlm-12", "once-adlm"),
        only_by_name=True,
    ),
    "finals": Group(
        "Is it the same at the paper's small size, with GPT-2's tokens?",
        FINALS,
        (
            mdlm("final-mdlm-18", "MDLM, 18 blocks of 768", "model.blocks=18", *BEST_MUON, seeds=THREE),
            adlm("final-adlm", "ADLM 12 + 6 blocks of 768", *SMALL, *BEST_MUON, IDENTITY, seeds=THREE),
            mdlm("final-mdlm-24", "MDLM, 24 blocks of 768: parameters of ADLM", "model.blocks=24", *BEST_MUON),
            auxiliary(
                "final-auxiliary",
                "MDLM 18 with the same auxiliary loss after block 12",
                *SMALL,
                *BEST_MUON,
                seeds=THREE,
            ),
            mdlm(
                "final-mdlm-18-954-steps",
                "MDLM, 18 blocks, 954 steps: GPU seconds of ADLM",
                "model.blocks=18",
                *BEST_MUON,
                "train.steps=954",
            ),
            mdlm("final-mdlm-18-1e-3", "MDLM, 18 blocks, 1e-3", "model.blocks=18", MUON),
            adlm("final-adlm-1e-3", "ADLM 12 + 6, 1e-3", *SMALL, MUON, IDENTITY),
            mdlm("final-mdlm-24-1e-3", "MDLM, 24 blocks, 1e-3", "model.blocks=24", MUON),
            published("final-published", "ADLM 12 + 6, published bridge and gamma, AdamW 1e-3", *SMALL),
        ),
        ("final-mdlm-18", "final-adlm"),
        "gpt2",
        only_by_name=True,
    ),
    "quickstart": Group(
        "Which recipe for minutes on a CPU?",
        QUICKSTART,
        tuple(of_quickstarts()),
        ("quick-mdlm-adamw", "quick-mdlm-muon-4e-3"),
        "bpe-2048",
        only_by_name=True,
    ),
    "smoke": Group(
        "Does the arena run? Tiny models on a CPU.",
        SMOKE,
        (
            Row("smoke-mdlm", "MDLM", "owt/mdlm", ("schedule.eps=0", "model.blocks=2"), (0, 1)),
            Row(
                "smoke-auxiliary",
                "MDLM with auxiliary loss",
                "owt/adlm",
                ("schedule.eps=0", "model.blocks=1", "model.denoiser_blocks=1", "model.bridge=none", *STRONG),
                (0, 1),
            ),
            Row("smoke-ar", "AR", "owt/ar", ("model.blocks=2",)),
        ),
        ("smoke-mdlm",),
        "bytes",
        only_by_name=True,
    ),
}
