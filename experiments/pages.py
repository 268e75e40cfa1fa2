"""The tables of README.md, docs/results.md and the READMEs of experiments/ that follow from results.jsonl files.

    python experiments/pages.py            # which pages differ from the results
    python experiments/pages.py --write    # bring them up to date

A page has the table NAME between `<!-- table: NAME -->` and `<!-- end -->`. A test compares all pages.
"""

import functools
import json
import math
import re
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from arena.tables import ARENA, Result, at_equal_seconds, paired, released_bound, stderr_of
from growth.run import RESULTS, figure_link, read_results
from growth.run import TABLES as GROWTH
from reasoning.tables import METHODS, groups_of, published, seeds_of
from scipy.interpolate import CubicSpline
from scipy.stats import ttest_1samp
from sweep import FOLDER, Results, key_of

from adlm.config.load import resolve

ROOT = FOLDER.parent
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted(FOLDER.glob("*/README.md")))
MARK = re.compile(r"<!-- table: (\S+) -->\n.*?<!-- end -->", re.DOTALL)
MDLM, ADLM, AUXILIARY = "mdlm-muon-2e-3", "adlm-muon-2e-3", "auxiliary-muon-2e-3"
RELEASED = "released-1e-3"
LAST_SEED = 14
SAMPLERS = ("ancestral", "remdm-loop")


def filled(page: str) -> str:
    """The page with the tables that follow from the results."""
    return MARK.sub(lambda mark: f"<!-- table: {mark[1]} -->\n\n{TABLES[mark[1]]()}\n\n<!-- end -->", page)


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = (head, ["---"] * len(head), *rows)
    return (
        "\n".join(f"| {' | '.join(cells)} |" for cells in lines).replace("| --- |", "|---|").replace(" --- |", "---|")
    )


@functools.cache
def results_of(question: str) -> Results:
    return Results(FOLDER / question / "results.jsonl")


def seeds(row: str) -> dict[int, Result]:
    """The results of a row of the arena, by seed."""
    trials = results_of("arena").of("trial")
    return {seed: trials[key_of(row, seed)] for seed in range(LAST_SEED + 1) if key_of(row, seed) in trials}


def signed(value: float, digits: int = 3) -> str:
    return f"{value:+.{digits}f}".replace("-", "−")


def mean_and_error(gaps: Sequence[float], digits: int, with_p: bool) -> str:
    error = np.std(gaps, ddof=1) / math.sqrt(len(gaps))
    chance = ttest_1samp(gaps, 0).pvalue
    p = "p < 0.001" if chance < 0.001 else f"p = {chance:.{2 if chance >= 0.01 else 3}f}"
    return f"{signed(float(np.mean(gaps)), digits)} ± {error:.{digits}f}{f' ({p})' if with_p else ''}"


def gap(ours: str, theirs: str, digits: int = 3, with_p: bool = False) -> str:
    """The mean difference of two rows over pairs of seeds; of one pair, marked 1, with its error over documents."""
    our, their = seeds(ours), seeds(theirs)
    common = sorted(our.keys() & their.keys())
    if not common or ours == theirs:
        return ""
    if len(common) > 1:
        return mean_and_error([our[seed]["nats"] - their[seed]["nats"] for seed in common], digits, with_p)
    estimate = paired(our[common[0]], their[common[0]])
    if estimate is None:
        return ""
    return f"{signed(estimate.nats, digits)} ± {stderr_of(estimate):.{digits}f} ¹"


def values(row: str, digits: int = 4) -> str:
    return ", ".join(f"{result['nats']:.{digits}f}" for result in seeds(row).values())


def mean(row: str, digits: int = 4) -> str:
    nats = [result["nats"] for result in seeds(row).values()]
    return f"{np.mean(nats):.{digits}f}" if len(nats) > 1 else ""


def compared(rows: Mapping[str, str], against: Mapping[str, str], *, with_p: bool = False) -> str:
    """A table of rows of the arena, by name and title, with differences from some of them."""
    head = ["", "parameters", "nats per token, one value per seed", "mean", *(f"minus {to}" for to in against.values())]
    lines = []
    for row, title in rows.items():
        parameters = f"{next(iter(seeds(row).values()))['parameters']:,}"
        gaps = [gap(row, other, 4, with_p) for other in against]
        lines.append([title, parameters, values(row), mean(row), *gaps])
    return markdown(head, lines)


def titled(rows: str) -> dict[str, str]:
    """Names of rows of the arena, with their titles in the sweep."""
    return {row: ARENA.rows[row].title for row in rows.split()}


def first(num: int, rows: Mapping[str, str]) -> dict[str, str]:
    return dict(list(rows.items())[:num])


def compared_briefly(rows: Mapping[str, str], to: str, title: str) -> str:
    """The same with the mean over seeds and one difference."""
    lines = []
    for row, name in rows.items():
        found = list(seeds(row).values())
        parameters, nats = found[0]["parameters"] / 1e6, np.mean([result["nats"] for result in found])
        lines.append([name, f"{parameters:.1f}M", f"{nats:.3f}", gap(row, to)])
    return markdown(["", "parameters", "nats", f"minus {title}"], lines)


def anchoring() -> str:
    """ADLM minus what it is compared with, at three sizes."""
    quick = "quick-adlm-muon-identity-8e-3"
    seconds = at_equal_seconds(ARENA.groups["muon"], results_of("arena").of("trial"), results_of("arena").of("timing"))
    assert seconds is not None
    pairs = [seconds.nats[ADLM][seed] - seconds.nats[MDLM][seed] for seed in seconds.nats[MDLM]]
    lines = [
        (
            "MDLM of equal depth",
            (ADLM, MDLM),
            ("final-adlm", "final-mdlm-18"),
            (quick, "quick-mdlm-muon-4e-3"),
        ),
        (
            "MDLM with at least as many parameters",
            (ADLM, "mdlm-matched-muon-2e-3"),
            ("final-adlm", "final-mdlm-24"),
            (quick, "quick-mdlm-muon-wide"),
        ),
        (
            "MDLM with the same auxiliary loss",
            (ADLM, AUXILIARY),
            ("final-adlm", "final-auxiliary"),
            (quick, "quick-auxiliary-muon-8e-3"),
        ),
    ]
    rows = [[title, *(gap(*pair, with_p=True) for pair in pairs)] for title, *pairs in lines]
    rows.append(
        [f"MDLM of equal depth, after {seconds.seconds:.0f} GPU seconds", mean_and_error(pairs, 3, True), "", ""]
    )
    one, quick_one = "objective-adlm-one", gap("quick-adlm-one", "quick-mdlm-one", with_p=True)
    rows.append(["MDLM of equal depth, both with weight 1", gap(one, "objective-mdlm-one", with_p=True), "", quick_one])
    rows.append(["the same with the auxiliary loss", gap(one, "objective-auxiliary-one", with_p=True), "", ""])
    fresh, quick_fresh = (gap(f"{group}-adlm", f"{group}-mdlm", with_p=True) for group in ("confirm", "quick-confirm"))
    rows.append(["MDLM, weight 1, equal seconds, fresh seeds", fresh, "", quick_fresh])
    rows.append(["the same, brief anchor loss", gap("brief-adlm", "brief-mdlm", with_p=True), "", ""])
    rare = gap("adlm-rare-muon-2e-3", "adlm-random-muon-2e-3", with_p=True)
    quick_rare = gap("quick-adlm-muon-identity-rare", "quick-adlm-muon-identity-random", with_p=True)
    rows.append(["*rare minus random anchors*", rare, "", quick_rare])
    return markdown(["ADLM minus", "50M parameters", "255M parameters", "quickstart, 0.6M"], rows)


def confirmed(mdlm: str, adlm: str, step: int, auxiliary: str = "") -> str:
    """Fresh seeds: differences at equal seconds, and after equally many steps."""
    names = [name for name in (mdlm, auxiliary, adlm) if name]
    after = {name: {seed: curve_at(trial, step) for seed, trial in seeds(name).items()} for name in names}

    def minus(ours: str) -> str:
        common = sorted(after[ours].keys() & after[mdlm].keys())
        return mean_and_error([after[ours][seed] - after[mdlm][seed] for seed in common], 4, True)

    lines, of = [], ARENA.rows[mdlm].seeds
    for name in names:
        found = seeds(name)
        nats = ", ".join(f"{found[seed]['nats']:.4f}" if seed in found else "–" for seed in of)
        gaps = [gap(name, mdlm, 4, True), minus(name), *([gap(name, auxiliary, 4, True)] if auxiliary else [])]
        lines.append([ARENA.rows[name].title, nats, mean(name), *("" if name == mdlm else each for each in gaps)])
    head = [f"nats per token, seeds {of[0]} to {of[-1]}", "mean", "minus MDLM", f"minus MDLM after {step} steps"]
    return markdown(["", *head, *(["minus auxiliary"] if auxiliary else [])], lines)


CODE_ADLM = "code-adlm-all code-adlm-random code-adlm-syntax code-adlm-rare"


def code_anchors() -> str:
    """The group `code`: bounds by the rule of the anchors, and their differences."""
    against = {"code-mdlm": "MDLM", "code-auxiliary": "auxiliary loss", "code-adlm-random": "random tokens"}
    against["code-adlm-all"] = "every token"
    lines = []
    for row, title in titled(f"code-mdlm code-auxiliary {CODE_ADLM}").items():
        found = seeds(row)
        nats = ", ".join(f"{found[seed]['nats']:.4f}" for seed in ARENA.rows[row].seeds)
        gaps = [gap(row, to, 4, True) if row != to else "" for to in against]
        lines.append([title.removeprefix("code: "), nats, *gaps])
    return markdown(["", "nats per token, seeds 0, 1, 2", *(f"minus {to}" for to in against.values())], lines)


def code_at_equal_computing() -> str:
    """The group `code`: after as many steps of ADLM as compute for as long as the 320 of MDLM, by 512 held-out rows.

    A step of these rows was not timed alone. Those of the group `objective` have the same shapes and other shares of
    anchors. Between two validations the bound is interpolated linearly.
    """
    timed = results_of("arena").of("timing")
    mdlm, most, few = (
        timed[row]["busy_seconds_per_step"]
        for row in ("objective-mdlm-one", "objective-adlm-one", "objective-adlm-one-random")
    )
    last = next(iter(seeds("code-mdlm").values()))["steps"]
    budgets = [round(last * mdlm / each) for each in (most, few)]

    def at(trial: Result, step: int) -> float:
        steps, _, bounds = np.array(trial["curve"])[:, :3].T
        return float(np.interp(step, steps, bounds))

    theirs, lines = seeds("code-mdlm"), []
    for row, title in titled(f"code-auxiliary {CODE_ADLM}").items():
        ours = seeds(row)
        common = sorted(ours.keys() & theirs.keys())
        gaps = [[at(ours[seed], step) - at(theirs[seed], last) for seed in common] for step in (*budgets, last)]
        lines.append([title.removeprefix("code: "), *(mean_and_error(each, 3, True) for each in gaps)])
    return markdown([f"minus MDLM after {last} steps", *(f"after {step} steps" for step in (*budgets, last))], lines)


def budgets(mdlm: str, others: Sequence[str], as_many: Callable[[int], float]) -> str:
    """Differences at equal GPU seconds after 300, 400, ... steps of MDLM, by 512 held-out rows.

    Those are `as_many` steps of the others, whose bounds are of a cubic spline between validations.
    """
    theirs, lines = seeds(mdlm), []
    for step, *_ in next(iter(theirs.values()))["curve"][2:-1]:
        cells = []
        for name in others:
            curves = {seed: np.array(trial["curve"])[:, (0, 2)].T for seed, trial in seeds(name).items()}
            gaps = [
                float(CubicSpline(*curve)(as_many(step))) - curve_at(theirs[seed], step)
                for seed, curve in curves.items()
            ]
            cells.append(mean_and_error(gaps, 3, True))
        lines.append([str(step), f"{as_many(step):.0f}", *cells])
    titles = (f"{ARENA.rows[name].title}, minus MDLM" for name in others)
    return markdown(["steps of MDLM", "of the others", *titles], lines)


def confirm_budgets() -> str:
    (adlm, *_), (mdlm, *_) = (list(seeds(name).values()) for name in ("confirm-adlm", "confirm-mdlm"))
    return budgets(
        "confirm-mdlm", ("confirm-adlm", "confirm-auxiliary"), lambda step: step * adlm["steps"] / mdlm["steps"]
    )


def brief_budgets() -> str:
    """A step of ADLM takes longer while it has the anchor loss."""
    timed, trial = results_of("arena").of("timing"), next(iter(seeds("brief-adlm").values()))
    mdlm, adlm = timed["brief-mdlm"]["seconds_per_step"], timed["brief-adlm"]
    last = trial["steps"] * resolve(trial["overrides"]).anchor.until

    def as_many(step: int) -> float:
        anchored = min(last, step * mdlm / adlm["with_anchor_loss"])
        return anchored + (step * mdlm - anchored * adlm["with_anchor_loss"]) / adlm["without"]  # type: ignore[no-any-return]

    return budgets("brief-mdlm", ("brief-adlm",), as_many)


def curve_at(trial: Result, step: int) -> float:
    """The bound of 512 held-out rows after a number of steps."""
    return next(nats for at, _, nats, _ in trial["curve"] if at == step)


def until_released(rows: Mapping[str, str]) -> str:
    found = released_bound(results_of("arena").of("trial"), results_of("arena").of("timing"))
    assert found is not None
    own, _ = found.released.seconds_until(found.nats)
    lines = []
    for row, title in rows.items():
        trials = sorted((trial for trial in found.trials if trial.row.name == row), key=lambda trial: trial.seed)
        seconds = [trial.seconds_until(found.nats)[0] for trial in trials]
        ratios = ", ".join(f"{each / own:.3f}" for each in seconds)
        lines.append([title, ", ".join(f"{each:.1f}" for each in seconds), ratios])
    head = ["one value per seed", f"seconds until {found.nats:.3f} nats", "divided by the released settings"]
    return markdown(head, lines)


def recipe_parts() -> str:
    """What leaving out a part of recipe/modern costs in the quickstart."""
    whole, lines = "quick-mdlm-muon-4e-3", []
    for row, title in (
        ("quick-mdlm-muon-published-start", "`model.start=neighbours`"),
        ("quick-mdlm-muon-no-unigrams", "`train.unigram_start=true`"),
        ("quick-mdlm-adamw", "Muon (AdamW instead)"),
        ("quick-mdlm-muon-dropout", "no dropout (0.1 as published)"),
    ):
        lines.append([title, mean(row, 3), gap(row, whole)])
    identity = ("quick-adlm-muon-8e-3", "quick-adlm-muon-identity-8e-3")
    lines.append(["`model.bridge_start=identity` (ADLM)", mean(identity[0], 3), gap(*identity)])
    return markdown(["left out", "nats per token", "cost"], [["nothing", mean(whole, 3), ""], *lines])


def texts(settings: Iterable[tuple[str, str, int]], *, short: bool = False) -> str:
    """Metrics of generated texts of the models with Muon, seed 0; `short`: without times, repetition and TinyLlama."""
    titles = {ADLM: "ADLM", MDLM: "MDLM", "mdlm-14-muon-2e-3": "MDLM 14"}
    results, small, large = results_of("arena"), ".SmolLM2-135M-Instruct.Q4_1", ".tinyllama"
    cards, lines = results.of("card"), list[list[str]]()
    for row, sampler, steps in settings:
        name = f"{row}-seed0-{sampler}-{steps}"
        card, other = cards[name + small], cards.get(name + large)
        mauve = f"{card['mauve']['value']:.3f} ± {card['mauve']['spread']:.3f}"
        seconds = f"{100 * results.of('speed')[name]['seconds_per_sequence']:.2f}"
        lines.append([titles[row], f"{sampler}, {steps}", seconds, *_judged(card, other), mauve])
    references = (cards[f"{ADLM}-seed0-ancestral-64{judge}"]["reference_judged"] for judge in (small, large))
    lines.append(["held-out text", "", "", *_judged(*references), ""])
    head = [
        "",
        "sampler, steps",
        "s per 100 texts",
        "gen-PPL, SmolLM2",
        "gen-PPL, TinyLlama",
        "entropy",
        "rep-4",
        "MAUVE",
    ]
    columns = (0, 3, 5, 7) if short else range(len(head))
    return markdown([head[at] for at in columns], ([line[at] for at in columns] for line in lines))


def judged_texts(*settings: tuple[str, str, int]) -> str:
    """Texts of rows of the arena by sampler and steps, judged by TinyLlama, one value per seed."""
    cards, speeds = (results_of("arena").of(kind) for kind in ("card", "speed"))
    lines = []
    for row, sampler, steps in settings:
        names = [f"{key_of(row, seed)}-{sampler}-{steps}" for seed in range(9)]
        found = [name for name in names if f"{name}.tinyllama" in cards]
        judged = [cards[f"{name}.tinyllama"] for name in found]
        seconds = ", ".join(f"{100 * speeds[name]['seconds_per_sequence']:.2f}" for name in found)
        perplexities = ", ".join(f"{card['perplexity']['pooled']['value']:.1f}" for card in judged)
        entropies = ", ".join(f"{card['entropy']['value']:.3f}" for card in judged)
        lines.append([ARENA.rows[row].title, f"{sampler}, {steps}", seconds, perplexities, entropies])
    return markdown(["one value per seed", "sampler, steps", "s per 100 texts", "gen-PPL, TinyLlama", "entropy"], lines)


def _judged(card: Mapping[str, Any], by_second: Mapping[str, Any] | None) -> list[str]:
    pooled = [each["perplexity"]["pooled"] if each else None for each in (card, by_second)]
    perplexities = [f"{each['value']:.3g} ± {each['stderr']:.2g}" if each else "" for each in pooled]
    entropy, repeated = card["entropy"], card["diversity"]["repeated"]
    return [*perplexities, f"{entropy['value']:.3f} ± {entropy['stderr']:.3f}", f"{repeated['value']:.1%}"]


def all_texts() -> str:
    """Every setting with a card of both samplers, in the order of sampler and steps; MDLM 14 after the others."""
    names = [name.removesuffix(".SmolLM2-135M-Instruct.Q4_1") for name in results_of("arena").of("card")]
    found = {re.fullmatch(r"(.*)-seed0-(ancestral|remdm-loop)-(\d+)", name) for name in names}
    settings = [(match[1], match[2], int(match[3])) for match in found if match]
    order = (ADLM, MDLM, "mdlm-14-muon-2e-3")
    return texts(sorted(settings, key=lambda each: (each[1], each[2], order.index(each[0]))))


def reasoning() -> str:
    """Accuracies of SmolLM2 by method, one value per seed."""
    groups = groups_of(results_of("reasoning"))
    lines = [
        [
            f"`{method}`",
            *(percent(seeds_of(groups[f"smollm2-{data}"], method)) for data in ("prosqa", "prontoqa", "gsm8k")),
        ]
        for method in METHODS
    ]
    return markdown(["% solved, one value per seed", "ProsQA", "ProntoQA", "GSM8K"], lines)


def percent(rows: Sequence[Result]) -> str:
    return ", ".join(f"{100 * row['accuracy']:.1f}" for row in rows)


def accuracies(columns: Mapping[str, str], *, tokens: bool = False) -> str:
    """Accuracies with their 95% intervals of groups of the reasoning sweep, by name and title."""
    groups, lines = groups_of(results_of("reasoning")), []
    for method in ("first", "first-again", *METHODS):
        found = [seeds_of(groups[group], method) for group in columns]
        if not any(found):
            continue
        cells = [", ".join(_with_interval(row) for row in rows) for rows in found]
        if tokens:
            (rows,) = found
            paper = published(rows[0]["data"]).get(method, "")
            cells += [f"{np.mean([row['tokens'] for row in rows]):.1f}", str(paper)]
        lines.append([f"`{method}`", *cells])
    head = ["% solved, one value per seed (95% interval)", *columns.values()]
    return markdown([*head, *(["tokens written", "paper, GPT-2"] if tokens else [])], lines)


def _with_interval(row: Result) -> str:
    low, high = row["interval"]
    return f"{100 * row['accuracy']:.1f} ({100 * low:.1f} to {100 * high:.1f})"


def quickstart() -> str:
    report = json.loads((FOLDER / "quickstart" / "report.json").read_text())
    lines = []
    for name, title in (("adlm", "ADLM, 1 + 2 blocks"), ("mdlm", "MDLM, 3 blocks")):
        of = report[name]
        nats = f"{of['nats']:.3f} ± {of['stderr']:.3f}"
        lines.append([title, nats, f"{of['parameters']:,}", f"{of['seconds']:.0f} s"])
    counted = f"{report['unigram_nats']:.3f} / {report['bigram_nats']:.3f}"
    lines.append(["unigrams / bigrams, counted", counted, "", ""])
    return markdown(["", "bound, nats per token", "parameters", "training"], lines)


def quick(rows: str) -> str:
    """Bounds of models of the quickstart, named without their prefix, one value per seed."""
    found = titled(" ".join(f"quick-{row}" for row in rows.split()))
    lines = [[title, values(row, 3), mean(row, 3), gap(row, "quick-mdlm-muon-4e-3")] for row, title in found.items()]
    return markdown(["", "nats per token, one value per seed", "mean", "minus MDLM with Muon"], lines)


CAUSAL = ("causal-mix", "causal-s1")
BLOCKS_OF_4 = ("blocks4", "blocks4-s1", "blocks4-s2")
"""The seeds of two models of experiments/adapt."""


def quick_objective() -> str:
    """Bounds of models of the quickstart by training weight and planner, minus those with the bound's weight."""
    mdlm, adlm = "quick-mdlm-bound", "quick-adlm-muon-identity"
    of_times = ("all-times", "t-min-0.2", "power-1", "power-1.5", "power-2")
    pairs = [("quick-mdlm-one", mdlm), *((f"quick-mdlm-muon-{each}", mdlm) for each in of_times)]
    rows = [(mdlm, mdlm), ("quick-mdlm-unclipped", mdlm), *pairs, ("quick-mdlm-planner", mdlm)]
    rows += [(adlm, adlm), ("quick-adlm-one", adlm), ("quick-adlm-planner", adlm)]
    titles = {adlm: "adlm, weight of the bound"}
    lines = [
        [titles.get(row, ARENA.rows[row].title), values(row), mean(row), gap(row, to, 4, with_p=True)]
        for row, to in rows
    ]
    return markdown(["", "nats per token, one value per seed", "mean", "minus the bound's weight"], lines)


LENGTH_ROWS = {"quick-mdlm-bound": "0", "quick-mdlm-lengths-0.01": "1%", "quick-mdlm-lengths-0.1": "10%"}


def short(row: str, setting: str, metric: str) -> list[float]:
    """A metric of texts of a setting, or of held-out rows of a length, by seed."""
    records = results_of("arena").of("short")
    found = [records[f"{key_of(row, seed)}-{setting}"][metric] for seed in range(3)]
    return [each["value"] if isinstance(each, dict) else each for each in found]


def quick_lengths() -> str:
    """Bounds of models of the quickstart by the share of rows of random length, on whole rows and on half rows."""
    to, lines = "quick-mdlm-bound", []
    for row, share in LENGTH_ROWS.items():
        half, of_to = (np.array(short(each, "32", "nats")) for each in (row, to))
        gap_of_half = "" if row == to else mean_and_error((half - of_to).tolist(), 4, with_p=True)
        whole = gap(row, to, 4, with_p=True)
        lines.append([share, values(row), whole, ", ".join(f"{each:.4f}" for each in half), gap_of_half])
    head = ["rows of random length", "rows of 64 tokens, one value per seed", "minus 0", "rows of 32 tokens", "minus 0"]
    return markdown(head, lines)


def quick_short_texts() -> str:
    """Texts of these models of full and half length: means over seeds, with their standard errors over seeds."""
    lines = []
    for length in (64, 32):
        for sampler in ("ancestral", "confidence"):
            for row, share in LENGTH_ROWS.items():
                cells = []
                for metric in ("repeated", "eos_before_end", "eos_at_end", "entropy"):
                    found = np.array(short(row, f"{sampler}-{length}", metric))
                    average, error = found.mean(), found.std(ddof=1) / math.sqrt(len(found))
                    is_share = metric != "entropy"
                    cells.append(f"{average:.1%} ± {error:.1%}" if is_share else f"{average:.3f} ± {error:.3f}")
                lines.append([f"{length}", sampler, share, *cells])
    head = ["tokens", "sampler", "random length", "rep-4", "eos before the end", "eos at the end", "entropy"]
    return markdown(head, lines)


@functools.cache
def adapted(file: str) -> list[Any]:
    """The results of experiments/adapt."""
    return [json.loads(line) for line in (FOLDER / "adapt" / file).read_text().splitlines()]


def bits(model: str, text: str, estimator: str, minus: str = "") -> str:
    """Bits per byte, with the error over documents where there is one; or the difference from an exact likelihood."""
    found = {(row["model"], row["text"], row["estimator"]): row for row in adapted("results.jsonl")}
    row = found[model, text, estimator]
    if minus:
        return signed(row["bits_per_byte"] - found[minus, text, "exact"]["bits_per_byte"])
    error = row["over_documents"]
    return f"{row['bits_per_byte']:.3f}" + (f" ± {error:.3f}" if error else "")


def seeds_minus_causal(models: tuple[str, ...], text: str, estimator: str) -> str:
    """The mean of several seeds minus that of the fine-tuned causal model, with its standard error over seeds."""
    found = {(row["model"], row["text"], row["estimator"]): row["bits_per_byte"] for row in adapted("results.jsonl")}
    groups = [[found[model, text, estimator] for model in models], [found[model, text, "exact"] for model in CAUSAL]]
    error = math.sqrt(sum(statistics.variance(values) / len(values) for values in groups))
    return f"{signed(statistics.mean(groups[0]) - statistics.mean(groups[1]))} ± {error:.3f}"


def adapt_bits() -> str:
    to, lines = "causal-fine-tuned", []
    for model, estimator, title, kind in (
        ("base", "exact", "SmolLM2, causal, as it is", "exact"),
        (to, "exact", "the same, fine-tuned", "exact"),
        ("full4", "left-to-right", "blocks of 4, left to right", "exact"),
        ("full4", "causal", "blocks of 4, causal copy", "exact"),
        ("full4", "any-order", "blocks of 4, random order", "bound"),
        ("lora4", "left-to-right", "LoRA, left to right", "exact"),
        ("lora4", "causal", "LoRA, causal copy", "exact"),
        ("lora4", "any-order", "LoRA, random order", "bound"),
    ):
        cells = [
            cell
            for text in ("enwiki", "books")
            for cell in (bits(model, text, estimator), "" if model == to else bits(model, text, estimator, to))
        ]
        lines.append([title, kind, *cells])
    return markdown(["bits per byte", "", "Wikipedia", "minus fine-tuned", "books", "minus fine-tuned"], lines)


def adapt_blocks() -> str:
    """Wikipedia / books."""

    def pair(model: str, estimator: str) -> str:
        return " / ".join(bits(model, text, estimator).partition(" ")[0] for text in ("enwiki", "books"))

    lines = [
        ["causal, as it is", "", pair("base", "exact"), "", ""],
        ["causal, fine-tuned", "", pair("causal-mix", "exact"), "", ""],
        ["the same, seed 1", "", pair("causal-s1", "exact"), "", ""],
    ]
    for model, title in (
        ("blocks4", "blocks of 4"),
        ("blocks4-s1", "the same, seed 1"),
        ("blocks4-s2", "the same, seed 2"),
        ("blocks8", "blocks of 8"),
        ("blocks16", "blocks of 16"),
        ("anchored4", "anchored, blocks of 4 ¹"),
        ("anchored4-k2", "the same, anchor network every second step ¹"),
        ("anchored4-once", "the same, anchor network once a block ¹"),
        ("lora-mix", "LoRA, blocks of 4, the first adapter"),
        ("box", "the same trained further: the box"),
    ):
        bound = "nelbo" if model.startswith("anchored") else "any-order"
        lines.append([title, *(pair(model, estimator) for estimator in ("left-to-right", "causal", "chained", bound))])
    head = ["left to right, exact", "causal copy, exact", "one call a block, exact", "random order, bound"]
    return markdown(["bits per byte, Wikipedia / books", *head], lines)


def adapt_choices() -> str:
    """Runs of 300 steps, Wikipedia."""
    lines = []
    for model, title in (
        ("short", "as blocks4"),
        ("short-all-times", "times from 0 (`time.t_min=0`), not from 0.45"),
        ("short-hidden", "`model.masked_keys=hidden`"),
        ("short-align-1", "`train.align_weight=1`"),
        ("short-chain-causal", "`train.chain_target=causal`"),
        ("short-muon-5e-4", "Muon, learning rate 5e-4"),
        ("short-muon-2e-4", "Muon, learning rate 2e-4"),
    ):
        estimators = ("left-to-right", "causal", "chained", "any-order")
        lines.append([title, *(bits(model, "enwiki", each).partition(" ")[0] for each in estimators)])
    head = ["left to right", "causal copy", "one call a block", "random order, bound"]
    return markdown(["300 steps, bits per byte on Wikipedia", *head], lines)


SHAPINGS: dict[str, dict[str, float]] = {
    "temperature 1": {"top_p": 1.0},
    "`top_p` 0.9": {"top_p": 0.9},
    "greedy": {"temperature": 0.0, "top_p": 1.0},
}
ADAPT_RUNS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("causal", "base", {"sampler": "ancestral"}),
    ("`speculative`, the box", "box", {"sampler": "speculative"}),
    ("`speculative`, `verify=false`, the box", "box", {"sampler": "speculative", "verify": False}),
)
JUDGED_RUNS = (
    ("causal, fine-tuned", "causal-mix", {"sampler": "ancestral"}),
    *ADAPT_RUNS,
    ("`speculative`, the first adapter", "lora-mix", {"sampler": "speculative"}),
    ("`speculative`, `verify=false`, the first adapter", "lora-mix", {"sampler": "speculative", "verify": False}),
    ("`speculative`, all weights", "blocks4", {"sampler": "speculative"}),
    ("`speculative`, `verify=false`, all weights", "blocks4", {"sampler": "speculative", "verify": False}),
)


def adapt_speed() -> str:
    """Tokens per second, and as a multiple of the causal model's."""
    lines, causal = [], dict[tuple[str, int], float]()
    for title, model, options in ADAPT_RUNS:
        for shaping, shaped in SHAPINGS.items():
            runs = {
                run["rows"]: run
                for run in adapted("speed.jsonl")
                if run["model"] == model and run["options"] == options | shaped
            }
            cells = []
            for rows in (1, 8, 64):
                rate = runs[rows]["tokens_per_second"]
                times = rate / causal.setdefault((shaping, rows), rate)
                cells.append(f"{rate:,.0f}" + (f" ({times:.2f})" if model != "base" else ""))
            lines.append([title, shaping, f"{runs[64]['tokens_per_call_of_a_row']:.2f}", *cells])
    head = ["tokens/s (times the causal model's)", "", "tokens per call and row", "1 row", "8 rows", "64 rows"]
    return markdown(head, lines)


def adapt_accepted() -> str:
    lines = []
    for title, model in (
        ("without a chain, all weights", "full4"),
        ("without a chain, LoRA", "lora4"),
        ("with a chain, all weights", "blocks4"),
        ("with a chain, LoRA, the first adapter", "lora-mix"),
        ("the same trained further, chain towards the causal copy: the box", "box"),
    ):
        found = {
            str({"top_p": 1.0, "temperature": 1.0} | run["options"]): f"{run['tokens_per_call_of_a_row']:.2f}"
            for run in adapted("speed.jsonl")
            if run["model"] == model and run["rows"] == 64
        }
        shown = [
            found[str({"top_p": 1.0, "temperature": 1.0, "sampler": "speculative"} | shaping)]
            for shaping in SHAPINGS.values()
        ]
        lines.append([title, *shown])
    return markdown(["tokens per call and row", *SHAPINGS], lines)


def adapt_judged() -> str:
    lines = []
    for row in adapted("judged.jsonl"):
        judged, options = row["judged"], row["options"]
        titles = {(model, str(run)): title for title, model, run in JUDGED_RUNS}
        sampler = {name: value for name, value in options.items() if name != "top_p"}
        title = titles.get((row["model"], str(sampler)), f"{row['model']}, `{options['sampler']}`")
        cells = [
            "{:.3f} ± {:.3f}".format(*judged[name])
            for name in ("nats_per_byte", "nats_per_token", "entropy", "repeated")
        ]
        lines.append([title, f"{options['top_p']:g}", f"{row['tokens_per_call_of_a_row']:.2f}", *cells])
    head = ["`top_p`", "tokens per call", "nats per byte", "nats per token", "entropy", "repeated"]
    return markdown(["24 texts of 256 tokens", *head], lines)


def summary() -> str:
    """README's results, one question a line."""
    prosqa = groups_of(results_of("reasoning"))["smollm2-prosqa"]
    acot, cot = (seeds_of(prosqa, method) for method in ("acot", "cot"))
    half = max(high - low for low, high in (row["interval"] for row in (*acot, *cot))) / 2
    ratios = re.findall(r"0\.\d+, .*(?= \|)", TABLES["released-short"]().splitlines()[-1])
    sizes = ("confirm-adlm", "confirm-mdlm", "50M parameters"), ("final-adlm", "final-mdlm-18", "255M, equal steps")
    lines = [
        [
            "Does anchoring lower the bound?",
            "Not at equal GPU seconds",
            "ADLM minus MDLM, nats (p uncorrected): "
            + ", ".join(f"{gap(*rows, with_p=True)} at {of}" for *rows, of in sizes),
            "[arena](experiments/arena/README.md)",
        ],
        [
            "Can a pretrained model become a diffusion model?",
            "Yes, in blocks of 4; not in random order, and seldom faster",
            "bits per byte minus its causal fine-tuning: "
            f"{seeds_minus_causal(BLOCKS_OF_4, 'enwiki', 'left-to-right')} left to right, "
            f"{seeds_minus_causal(BLOCKS_OF_4, 'enwiki', 'any-order')} in random order (± over seeds)",
            "[adapt](experiments/adapt/README.md)",
        ],
        [
            "Is there a faster recipe than the released one?",
            "Yes, `recipe/modern`",
            f"ADLM reaches the bound of the released settings (one seed) in {ratios[0]} of their GPU seconds; "
            f"weight 1 changes its bound by {gap('objective-adlm-one', 'order-adlm', with_p=True)}",
            "[arena](experiments/arena/README.md#how-soon-is-the-released-bound-reached)",
        ],
        [
            "How fast is this code?",
            "Faster than the released code",
            "training 314k tokens/s, released 36k; a text 1.50 s, released 31.3 s (H200)",
            "[benchmarks](benchmarks/README.md)",
        ],
        [
            "Does anchored chain of thought help?",
            "On one of three data sets",
            f"ProsQA: {percent(acot)}% solved, plain chain of thought {percent(cot)}%, ± {100 * half:.0f} points (95%)",
            "[reasoning](experiments/reasoning/README.md)",
        ],
        [
            "Own text: start from the model in the box?",
            "Yes",
            "novels: 1.47 bits per byte, from scratch 2.02, ± 0.02",
            "[own_text](experiments/own_text/README.md)",
        ],
    ]
    return markdown(["question", "answer", "figure", "read on"], lines)


def grown(table: Callable[[Mapping[str, Any]], str]) -> str:
    """A table of experiments/growth."""
    return table(read_results(RESULTS))


MUON_ROWS = {
    "mdlm-matched-muon-2e-3": "MDLM, 12 blocks of 544",
    "mdlm-14-muon-2e-3": "MDLM, 14 blocks",
    AUXILIARY: "MDLM 12 with the same auxiliary loss",
    MDLM: "MDLM, 12 blocks",
    ADLM: "ADLM 8 + 4; anchors: tau 5 (83%)",
    "adlm-all-muon-2e-3": "ADLM; anchors: every token",
    "adlm-random-muon-2e-3": "ADLM; anchors: a random 15%",
    "adlm-rare-muon-2e-3": "ADLM; anchors: the rarest 15%",
}
FINAL_ROWS = {
    "final-adlm": "ADLM 12 + 6",
    "final-auxiliary": "MDLM 18 with the same auxiliary loss",
    "final-mdlm-18": "MDLM, 18 blocks",
    "final-mdlm-24": "MDLM, 24 blocks",
    "final-mdlm-18-1e-3": "MDLM, 18 blocks, learning rate 1e-3",
}
CAUSAL_ROWS = {
    "ar": "AR, 12 blocks of 512",
    "ar-544": "AR, 12 blocks of 544: parameters of A2R",
    "a2r-0.1": "A2R, gamma 0.1, tau 5",
    "a2r-published": "A2R, published bridge and gamma",
    "a2r-0": "A2R, gamma 0",
    "a2r-all": "A2R, gamma 0.1, every token an anchor",
    "a2r-0.003": "A2R, gamma 0.003",
}
TABLES: dict[str, Callable[[], str]] = {
    **{f"growth-{name}": functools.partial(grown, table) for name, table in GROWTH.items()},
    "growth-figure": lambda: grown(figure_link),
    "summary": summary,
    "adapt-bits": adapt_bits,
    "adapt-blocks": adapt_blocks,
    "adapt-choices": adapt_choices,
    "adapt-speed": adapt_speed,
    "adapt-judged": adapt_judged,
    "adapt-accepted": adapt_accepted,
    "quickstart": quickstart,
    "anchoring": anchoring,
    "muon": lambda: compared(MUON_ROWS, {MDLM: "MDLM 12", ADLM: "ADLM"}),
    "muon-short": lambda: compared_briefly(first(5, MUON_ROWS), MDLM, "MDLM 12"),
    "muon-rates": lambda: compared(
        titled(
            "mdlm-muon-1e-3 auxiliary-muon-1e-3 adlm-muon-1e-3 mdlm-muon-4e-3 adlm-muon-4e-3 "
            "mdlm-muon-warm-up-25 mdlm-12"
        ),
        {MDLM: "MDLM 12, Muon 2e-3"},
    ),
    "control": lambda: compared(
        titled("mdlm-12 auxiliary adlm adlm-all adlm-random auxiliary-all adlm-gamma-0"),
        {"mdlm-12": "MDLM", "auxiliary": "auxiliary loss", "adlm": "ADLM"},
    ),
    "books": lambda: compared(
        titled("books-mdlm-matched books-auxiliary books-adlm books-mdlm-12"),
        {"books-mdlm-12": "MDLM 12", "books-adlm": "ADLM"},
    ),
    "decay": lambda: compared(
        titled("mdlm-14-muon-decay mdlm-muon-decay auxiliary-muon-decay adlm-muon-decay"),
        {"mdlm-muon-decay": "MDLM 12", "adlm-muon-decay": "ADLM"},
    ),
    "order": lambda: compared(
        titled(
            "order-mdlm order-adlm order-mdlm-text order-adlm-text order-mdlm-rare-4 order-mdlm-rare-0.25 "
            "order-mdlm-position-100 order-mdlm-text-next order-adlm-text-next"
        ),
        {"order-mdlm": "MDLM", "order-adlm": "ADLM"},
    ),
    "quick-order": lambda: compared(
        titled("quick-order-mdlm quick-order-mdlm-text quick-order-mdlm-rare-4 quick-order-adlm quick-order-adlm-text"),
        {"quick-order-mdlm": "MDLM", "quick-order-adlm": "ADLM", "quick-order-mdlm-text": "MDLM, learnt order"},
        with_p=True,
    ),
    "objective": lambda: compared(
        titled(
            "order-mdlm order-adlm objective-mdlm-one objective-adlm-one objective-auxiliary-one "
            "objective-adlm-one-random objective-adlm-one-rare objective-adlm-one-gamma-0 objective-mdlm-6-one "
            "objective-adlm-4+2-one"
        ),
        {"objective-mdlm-one": "MDLM, weight 1", "objective-adlm-one": "ADLM, weight 1"},
        with_p=True,
    ),
    "confirm": lambda: confirmed("confirm-mdlm", "confirm-adlm", 600, "confirm-auxiliary"),
    "quick-confirm": lambda: confirmed("quick-confirm-mdlm", "quick-confirm-adlm", 400),
    "confirm-budgets": confirm_budgets,
    "brief": lambda: confirmed("brief-mdlm", "brief-adlm", 600),
    "brief-budgets": brief_budgets,
    "quick-brief": lambda: compared(
        titled("quick-confirm-mdlm quick-confirm-adlm quick-brief-adlm"),
        {"quick-confirm-mdlm": "mdlm", "quick-confirm-adlm": "adlm"},
        with_p=True,
    ),
    "code": code_anchors,
    "code-computing": code_at_equal_computing,
    "asymmetric": lambda: compared(
        titled(
            "asymmetric-mdlm asymmetric-mdlm-6 asymmetric-8+4-every-4 asymmetric-8+4-gamma-0-every-4 "
            "asymmetric-10+2-every-4 asymmetric-10+2-gamma-0-every-4"
        ),
        {"asymmetric-mdlm": "MDLM 12", "asymmetric-10+2-gamma-0-every-4": "10 + 2, gamma 0, k = 4"},
        with_p=True,
    ),
    "quick-stale": lambda: compared(
        titled(
            "quick-stale-mdlm quick-stale-mdlm-2 quick-stale-2+1 quick-stale-2+1-every-4 "
            "quick-stale-2+1-gamma-0-every-4"
        ),
        {
            "quick-stale-mdlm": "MDLM",
            "quick-stale-2+1": "gamma 0.1, k = 1",
            "quick-stale-2+1-gamma-0-every-4": "gamma 0, k = 4",
        },
        with_p=True,
    ),
    "asymmetric-texts": lambda: judged_texts(
        ("asymmetric-mdlm", "remdm-loop", 64),
        ("asymmetric-mdlm", "remdm-loop", 32),
        ("asymmetric-mdlm-6", "remdm-loop", 58),
        ("asymmetric-10+2-every-4", "remdm-loop", 64),
        ("asymmetric-10+2-gamma-0-every-4", "remdm-loop", 64),
        ("asymmetric-8+4-every-4", "remdm-loop", 64),
        ("asymmetric-8+4-gamma-0-every-4", "remdm-loop", 64),
        ("asymmetric-mdlm", "ancestral", 64),
        ("asymmetric-mdlm", "ancestral", 34),
        ("asymmetric-mdlm-6", "ancestral", 64),
        ("asymmetric-10+2-every-4", "ancestral", 64),
        ("asymmetric-10+2-gamma-0-every-4", "ancestral", 64),
        ("asymmetric-8+4-every-4", "ancestral", 64),
        ("asymmetric-8+4-gamma-0-every-4", "ancestral", 64),
    ),
    "objective-texts": lambda: judged_texts(
        *((f"objective-{model}-one", sampler, 64) for sampler in SAMPLERS for model in ("mdlm", "auxiliary", "adlm"))
    ),
    "once": lambda: compared(
        titled("once-auxiliary once-mdlm-12 once-adlm"), {"once-mdlm-12": "MDLM 12", "once-adlm": "ADLM"}
    ),
    "finals": lambda: compared(FINAL_ROWS, {"final-mdlm-18": "MDLM 18", "final-adlm": "ADLM"}),
    "finals-short": lambda: compared_briefly(first(4, FINAL_ROWS), "final-mdlm-18", "MDLM 18"),
    "released-short": lambda: until_released(
        {
            RELEASED: "ADLM, released settings",
            MDLM: "MDLM, `recipe/modern`",
            "mdlm-muon-warm-up-25": "the same, shorter warm-up",
            ADLM: "ADLM, hidden bridge, `recipe/modern`",
        }
    ),
    "released": lambda: until_released(
        titled(
            f"{RELEASED} mdlm-muon-warm-up-25 mdlm-muon-4e-3 adlm-muon-4e-3 {MDLM} {AUXILIARY} {ADLM} "
            "mdlm-matched-muon-2e-3 adlm mdlm-12"
        )
    ),
    "recipe-parts": recipe_parts,
    "texts": lambda: texts(((row, "remdm-loop", 256) for row in (ADLM, MDLM, "mdlm-14-muon-2e-3")), short=True),
    "all-texts": all_texts,
    "causal": lambda: compared(CAUSAL_ROWS, {"ar": "AR of 512", "ar-544": "AR of 544"}),
    "causal-short": lambda: compared_briefly(first(4, CAUSAL_ROWS), "ar", "AR"),
    "reasoning": reasoning,
    "prosqa": lambda: accuracies({"smollm2-prosqa": "ProsQA"}, tokens=True),
    "gsm8k": lambda: accuracies({"smollm2-gsm8k": "GSM8K"}, tokens=True),
    "prontoqa": lambda: accuracies({"smollm2-prontoqa": "ProntoQA"}, tokens=True),
    "random-weights-muon": lambda: accuracies({"muon-prosqa": "ProsQA", "muon-prontoqa": "ProntoQA"}),
    "random-weights-adamw": lambda: accuracies(
        {
            "scratch-first": "ProsQA, 24,000 problems",
            "scratch-prosqa": "ProsQA, 100,000 problems",
            "scratch-prontoqa": "ProntoQA, 50,000 problems",
        }
    ),
    "quick-optimizers": lambda: quick(
        """
        mdlm-adamw mdlm-muon-2e-3 mdlm-muon-4e-3 mdlm-muon-8e-3
        adlm-adamw adlm-muon-2e-3 adlm-muon-4e-3 adlm-muon-8e-3
        auxiliary-adamw auxiliary-muon-4e-3 auxiliary-muon-8e-3
        """
    ),
    "quick-objective": quick_objective,
    "quick-lengths": quick_lengths,
    "quick-short-texts": quick_short_texts,
    "quick-times": lambda: quick(
        """
        mdlm-adamw-all-times mdlm-adamw-t-min-0.2 mdlm-adamw-power-1 mdlm-adamw-power-1.5 mdlm-adamw-power-2
        mdlm-muon-all-times mdlm-muon-t-min-0.2 mdlm-muon-power-1 mdlm-muon-power-1.5 mdlm-muon-power-2
        mdlm-muon-qk-norm mdlm-muon-constant mdlm-muon-warm-up-20
        """
    ),
    "bridge": lambda: quick(
        """
        mdlm-muon-4e-3 mdlm-muon-wide
        adlm-muon-4e-3 adlm-muon-gamma-0 adlm-muon-masked adlm-muon-until-0.3
        adlm-muon-plus-input adlm-muon-plus-input-gamma-0
        adlm-muon-identity adlm-muon-identity-8e-3 adlm-muon-identity-constant adlm-muon-identity-slow
        adlm-muon-identity-warm-up-20 adlm-muon-identity-2+1 adlm-muon-identity-tied
        adlm-muon-identity-rare adlm-muon-identity-random adlm-muon-identity-all adlm-muon-identity-frequent
        adlm-muon-identity-gamma-0 adlm-muon-identity-gamma-0.003 adlm-muon-identity-gamma-0.03
        adlm-muon-identity-gamma-0.3 adlm-muon-identity-gamma-1
        auxiliary-muon-4e-3 auxiliary-muon-8e-3 auxiliary-muon-tied auxiliary-muon-until-0.3
        adlm-muon-mixture adlm-muon-logits adlm-muon-logits-identity
        """
    ),
}


def main() -> None:
    changed = [page for page in PAGES if filled(page.read_text()) != page.read_text()]
    for page in changed:
        print(page.relative_to(ROOT))
        if "--write" in sys.argv[1:]:
            page.write_text(filled(page.read_text()))


if __name__ == "__main__":
    main()
