"""The results of the arena as Markdown tables. Trains nothing.

Every bound is measured on the same held-out rows with the same random numbers, so differences are paired: their
standard errors combine the Monte Carlo error with the one over documents, and do not include the training seed. The
spread over seeds is in a table of its own. Seconds are steps times the seconds of a step measured alone on the device.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.stats import ttest_1samp
from sweep import Group, Results, Row, key_of, sweep_of

from adlm.errors import UserError
from adlm.likelihood.standard_errors import Estimate, Nats, difference

Floats = NDArray[np.float64]
Result = Mapping[str, Any]
Trials = Mapping[str, Result]
"""Results by key."""
Timings = Mapping[str, Mapping[str, Any]]
"""By row."""
ARENA = sweep_of("arena")
TIMED_RUNS = 3
"""Of a sampling speed."""
IDLE = 0.1
"""A timing is doubtful if the GPU computed nothing in more than this fraction of it; 0.01 to 0.05 is usual."""


@dataclass(frozen=True)
class TimedTrial:
    """A trial whose seconds are comparable with those of others."""

    row: Row
    seed: int
    result: Result
    seconds_per_step: float

    @property
    def curve(self) -> tuple[Floats, Floats, Floats]:
        """Steps, seconds of training and validation bounds."""
        steps, _, bounds = np.array(self.result["curve"])[:, :3].T
        return steps, steps * self.seconds_per_step, bounds

    def seconds_until(self, bound: float) -> tuple[float, bool]:
        """Seconds until the curve first is at the bound, infinite if it never is; whether they are only an upper limit.

        Linear between two validations, which errs on the late side where a curve flattens. Before the first validation
        nothing is known.
        """
        _, times, bounds = self.curve
        if not (bounds <= bound).any():
            return math.inf, False
        after = int((bounds <= bound).argmax())
        if after == 0:
            return float(times[0]), True
        between = [after, after - 1]
        return float(np.interp(bound, bounds[between], times[between])), False


def waited_for_host(timing: Mapping[str, Any]) -> bool:
    """Whether the timing is doubtful. Its computing time is not: that hardly depends on the host."""
    busy = timing.get("busy_seconds_per_step")
    return busy is not None and busy < (1 - IDLE) * timing["seconds_per_step"]


def nats_as_json(nats: Nats) -> dict[str, Any]:
    """All that paired differences need, to 0.001 nats per document."""
    return {
        "exact": nats.exact,
        "group_nats": nats.groups.round(3).tolist(),
        "document_nats": nats.documents.round(3).tolist(),
        "document_tokens": nats.tokens.tolist(),
    }


def nats_of(result: Result) -> Nats:
    arrays = (np.array(result[name]) for name in ("group_nats", "document_nats", "document_tokens"))
    return Nats(*arrays, exact=result["exact"])


def stderr_of(estimate: Estimate) -> float:
    """Both standard errors combined; one that is too small to be separated from the other counts as 0."""
    return math.hypot(estimate.monte_carlo or 0.0, estimate.over_documents or 0.0)


def tables(results: Results) -> Iterator[str]:
    yield from bounds_tables(results.of("trial"), results.of("timing"))
    yield from generation_table(results)


def figures(results: Results, out: Path) -> list[Path]:
    from arena.figures import plot_groups, plot_released_bound  # machines that train may have no matplotlib

    files = (plot(results.of("trial"), results.of("timing"), out) for plot in (plot_groups, plot_released_bound))
    return [file for plotted in files for file in plotted]


def bounds_tables(results: Trials, timings: Timings) -> Iterator[str]:
    """The tables of all groups with results."""
    for name, group in ARENA.groups.items():
        if any(trial.key in results for trial in group.trials()):
            yield f"## {name}: {group.question}\n"
            yield from _at_equal_tokens(group, results, timings)
            texts = {result["held_out"]["sha256"] for _, _, result in trials_with_results(group, results)}
            if len(texts) > 1:
                yield "These trials are of different texts: neither seeds nor seconds are compared.\n"
                continue
            yield from _over_seeds(group, results)
            yield from _at_equal_seconds(group, results, timings)
    yield from _until_the_released_bound(results, timings)


def _rows(group: Group) -> list[Row]:
    """The rows of a group after those they are compared with."""
    return list(dict.fromkeys((*(ARENA.rows[name] for name in group.against), *group.rows)))


def trials_with_results(group: Group, results: Trials) -> Iterator[tuple[Row, int, Result]]:
    for row in _rows(group):
        for seed in row.seeds:
            if key_of(row.name, seed) in results:
                yield row, seed, results[key_of(row.name, seed)]


def _header(*cells: str) -> str:
    return f"| {' | '.join(cells)} |\n|{'---|' * len(cells)}"


def _at_equal_tokens(group: Group, results: Trials, timings: Timings) -> Iterator[str]:
    """At the end of training: every trial, with paired differences from the same seed of the rows in `against`."""
    against = [f"minus {name}" for name in group.against]
    yield _header("model", "seed", "parameters", "tokens", "step alone, ms", "anchors", "nats per token", *against)
    trials = list(trials_with_results(group, results))
    for row, seed, result in trials:
        share = "" if result["anchor_share"] is None else f"{result['anchor_share']:.1%}"
        gaps = [
            _paired_cell(result, results.get(key_of(name, seed))) if name != row.name else "" for name in group.against
        ]
        step = _step_cell(timings[row.name]) if row.name in timings else ""
        nats = f"{result['nats']:.4f} ± {result['stderr']:.4f}"
        counts = (f"{result['parameters']:,}", f"{result['tokens']:,}")
        cells = (row.title, str(seed), *counts, step, share, nats, *gaps)
        yield f"| {' | '.join(cells)} |"
    texts = {result["held_out"]["sha256"]: result for _, _, result in trials}
    for result in texts.values():
        num = len(result["document_tokens"])
        unit = result["held_out"]["unit"]
        yield f"\nMeasured on {sum(result['document_tokens']):,} tokens in {num} {unit}s. ± is one standard error.\n"


def _step_cell(timing: Mapping[str, Any]) -> str:
    """Milliseconds of a step; of a doubtful timing those in which the GPU computed."""
    if waited_for_host(timing):
        return f"GPU {1e3 * timing['busy_seconds_per_step']:.1f}"
    return f"{1e3 * timing['seconds_per_step']:.1f}"


def _paired_cell(ours: Result, theirs: Result | None) -> str:
    """The paired difference; empty without the other result."""
    if theirs is None:
        return ""
    if ours["held_out"] != theirs["held_out"]:
        return "other text"
    gap = paired(ours, theirs)
    return "not paired" if gap is None else f"{gap.nats:+.4f} ± {stderr_of(gap):.4f}"


def paired(ours: Result, theirs: Result | None) -> Estimate | None:
    """The paired difference; None without the other result, or if the two have not the same rows or replicates."""
    if theirs is None or ours["held_out"] != theirs["held_out"]:
        return None
    try:
        return difference(nats_of(ours), nats_of(theirs))
    except UserError:  # other --samples, or documents of which a causal model predicts no token
        return None


def _over_seeds(group: Group, results: Trials) -> Iterator[str]:
    """The rows with two or more seeds: mean, standard deviation, and the mean difference over pairs of seeds."""
    nats = {
        row.name: {seed: results[key]["nats"] for seed in row.seeds if (key := key_of(row.name, seed)) in results}
        for row in _rows(group)
    }
    several = [row for row in _rows(group) if len(nats[row.name]) > 1]
    if not several:
        return
    yield _header("model", "seeds", "mean", "standard deviation", *(f"minus {name}" for name in group.against))
    for row in several:
        values = list(nats[row.name].values())
        gaps = [_mean_gap(nats[row.name], nats[name]) if name != row.name else "" for name in group.against]
        cells = (row.title, str(len(values)), f"{np.mean(values):.4f}", f"{np.std(values, ddof=1):.4f}", *gaps)
        yield f"| {' | '.join(cells)} |"
    yield "\n± is the standard error of the mean over pairs of seeds; p is of a two-sided t-test that the mean is 0.\n"


def _mean_gap(ours: Mapping[int, float], theirs: Mapping[int, float]) -> str:
    """The mean difference over the seeds that both have; of several, its standard error and the p-value of a t-test."""
    gaps = np.array([ours[seed] - theirs[seed] for seed in ours.keys() & theirs.keys()])
    if not len(gaps):
        return ""
    if len(gaps) == 1:
        return f"{gaps.mean():+.4f}"
    test = ttest_1samp(gaps, 0)
    return f"{gaps.mean():+.4f} ± {gaps.std(ddof=1) / math.sqrt(len(gaps)):.4f} (p = {test.pvalue:.2g})"


def with_seconds(trials: Iterable[tuple[Row, int, Result]], timings: Timings) -> tuple[list[TimedTrial], str]:
    """The trials with a curve and comparable seconds, and a note on the seconds and on what is left out.

    Seconds of a step are those of the row's timing, else of the trial itself if nothing ran beside it. If timings are
    doubtful, all are the seconds in which the GPU computed; where these were not recorded, doubtful rows are left out.
    """
    trials = [trial for trial in trials if trial[2]["curve"]]
    known = {row.name: timings[row.name] for row, _, _ in trials if row.name in timings}
    doubtful = {row.name: row.title for row, _, _ in trials if row.name in known and waited_for_host(known[row.name])}
    by_computing = bool(doubtful) and all("busy_seconds_per_step" in timing for timing in known.values())
    timed, own, left_out, devices = list[TimedTrial](), dict[str, None](), dict[str, None](), dict[str, None]()
    for row, seed, result in trials:
        if row.name in known and (by_computing or row.name not in doubtful):
            seconds = known[row.name]["busy_seconds_per_step" if by_computing else "seconds_per_step"]
        elif row.name not in known and result["jobs"] == 1 and not by_computing:
            seconds = result["train_seconds"] / result["steps"]
            own[row.title] = None
        else:
            left_out[row.title] = None
            continue
        timed.append(TimedTrial(row, seed, result, float(seconds)))
        devices[known.get(row.name, result)["device"]] = None
    if len(devices) > 1:
        return [], f"Seconds of different devices are not compared: {', '.join(devices)}."
    notes = []
    if timed:
        kind = "GPU computing" if by_computing else "training steps"
        notes.append(f"Seconds of {kind} on {', '.join(devices)}, without compilation and validation")
    if timed and not own:
        notes[0] += ": steps times the seconds of a step measured alone on the device"
    if by_computing:
        titles = "; ".join(doubtful.values())
        notes.append(f"Not of whole steps, because the GPU waited for the host in the timing of: {titles}")
    if own:
        notes.append(f"Not timed, by the seconds of trials that ran alone: {'; '.join(own)}")
    if left_out:
        notes.append(f"Left out, because trials shared the device and have no good timing: {'; '.join(left_out)}")
    return timed, "".join(f"{note}. " for note in notes).strip()


@dataclass(frozen=True)
class AtEqualSeconds:
    """Validation bounds when the fastest trial ends, by linear interpolation."""

    seconds: float
    titles: dict[str, str]
    nats: dict[str, dict[int, float]]
    """By row and seed."""
    tokens: dict[str, list[float]]
    notes: str


def at_equal_seconds(group: Group, results: Trials, timings: Timings) -> AtEqualSeconds | None:
    """Of the trials whose learning rate does not decay; None of fewer than two."""
    constant = [trial for trial in trials_with_results(group, results) if trial[2]["decay"] == "constant"]
    trials, notes = with_seconds(constant, timings)
    if len(constant) < 2:
        return None
    seconds = min((trial.curve[1][-1] for trial in trials), default=0.0)
    found = AtEqualSeconds(seconds, {trial.row.name: trial.row.title for trial in trials}, {}, {}, notes)
    for trial in trials:
        steps, times, bounds = trial.curve
        found.nats.setdefault(trial.row.name, {})[trial.seed] = float(np.interp(seconds, times, bounds))
        step = float(np.interp(seconds, times, steps))
        found.tokens.setdefault(trial.row.name, []).append(step * trial.result["tokens"] / trial.result["steps"])
    return found


def _at_equal_seconds(group: Group, results: Trials, timings: Timings) -> Iterator[str]:
    found = at_equal_seconds(group, results, timings)
    if found is None:
        return
    if sum(map(len, found.nats.values())) > 1:
        yield f"After {found.seconds:.1f} s, by linear interpolation of the validation bounds:\n"
        yield _header("model", "seeds", "tokens", "nats per token", *(f"minus {name}" for name in group.against))
        for name, title in found.titles.items():
            nats = found.nats[name]
            gaps = [_mean_gap(nats, found.nats.get(other, {})) if other != name else "" for other in group.against]
            cells = (f"{np.mean(found.tokens[name]):,.0f}", f"{np.mean(list(nats.values())):.4f}", *gaps)
            yield f"| {title} | {len(nats)} | {' | '.join(cells)} |"
    yield f"\n{found.notes}\n"


@dataclass(frozen=True)
class ReleasedBound:
    """The bound at which the released configuration ends, with its best learning rate."""

    nats: float
    released: TimedTrial
    trials: list[TimedTrial]
    """All with comparable seconds on the same text, in the order in which they reach the bound."""
    notes: str

    @property
    def soonest(self) -> TimedTrial:
        """The first diffusion model to reach it; autoregressive likelihoods are exact and far lower."""
        return next(trial for trial in self.trials if trial.row.preset != "owt/ar")


def released_bound(results: Trials, timings: Timings) -> ReleasedBound | None:
    """None without the released configuration, or without its seconds."""
    recipe = ARENA.groups["bridge"].common
    groups = [group for group in ARENA.groups.values() if group.common == recipe]
    trials = {
        (row.name, seed): (row, seed, result)
        for group in groups
        for row, seed, result in trials_with_results(group, results)
    }
    texts = [result["held_out"] for row, _, result in trials.values() if _is_released(row)]
    timed, notes = with_seconds([trial for trial in trials.values() if trial[2]["held_out"] in texts], timings)
    released = [trial for trial in timed if _is_released(trial.row)]
    if not released:
        return None
    best = min(released, key=lambda trial: trial.curve[2][-1])
    nats = float(best.curve[2][-1])
    return ReleasedBound(nats, best, sorted(timed, key=lambda trial: trial.seconds_until(nats)), notes)


def _is_released(row: Row) -> bool:
    """Whether it is the released configuration, with any learning rate."""
    return row.name.startswith("released-")


def _until_the_released_bound(results: Trials, timings: Timings) -> Iterator[str]:
    found = released_bound(results, timings)
    if found is None:
        return
    own, _ = found.released.seconds_until(found.nats)
    yield "## How soon is the released configuration's bound reached?\n"
    yield f"The bound is {found.nats:.4f}, of {found.released.row.title}: the lowest over its learning rates.\n"
    yield _header("model", "seed", "nats per token at the end", "seconds until that bound", "divided by the released")
    for trial in found.trials:
        seconds, is_limit = trial.seconds_until(found.nats)
        limit = "at most " if is_limit else ""
        cells = (f"{limit}{seconds:.1f}", f"{limit}{seconds / own:.3f}") if seconds < math.inf else ("not reached", "")
        yield f"| {trial.row.title} | {trial.seed} | {trial.curve[2][-1]:.4f} | {' | '.join(cells)} |"
    yield f"\nValidation bounds, linear between two validations; at most: below it at the first one. {found.notes}\n"


def generation_table(results: Results) -> Iterator[str]:
    """One line per sampler setting, and one for the reference text."""
    cards, speeds = defaultdict[str, list[Result]](list), results.of("speed")
    for card in results.of("card").values():
        cards[Path(card["samples"]["file"]).stem].append(card)
    if not cards:
        return
    judges = sorted({_judge(card) for each in cards.values() for card in each})
    num_texts = {_judge(card): card["samples"]["num"] for each in cards.values() for card in each}
    perplexities = (f"gen-PPL, {judge} ({num_texts[judge]} texts)" for judge in judges)
    columns = ["model", "sampler", "steps", "calls", "s per 100 texts", *perplexities]
    columns += ["entropy", "distinct-2", "rep-4", "MAUVE"]
    yield "## Generated text\n"
    yield f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}"
    for name, of_setting in sorted(cards.items(), key=lambda item: _order(item[1][0])):
        made_by, speed = of_setting[0]["samples"]["made_by"], speeds.get(name)
        key, sampling = Path(made_by["model"]).name, made_by["sampling"]
        row, _, seed = key.rpartition("-seed")
        steps = str(sampling["steps"])
        calls, seconds = "", ""
        if speed is not None:
            calls, seconds = str(speed["network_calls"]), f"{100 * speed['seconds_per_sequence']:.2f}"
            steps += f" (as long as {speed['as_long_as']})" if speed["as_long_as"] else ""
        cells = [f"{ARENA.rows[row].title}, seed {seed}", sampling["sampler"], steps, calls, seconds]
        yield f"| {' | '.join(cells + _metrics({_judge(card): card for card in of_setting}, judges))} |"
    judged = {_judge(card): card["reference_judged"] for each in cards.values() for card in each if "reference" in card}
    if judged:
        yield f"| held-out text | | | | | {' | '.join(_metrics(judged, judges))} |"
    first = next(iter(cards.values()))[0]["samples"]
    texts = f"Texts of {first['made_by']['length']} tokens, nucleus 0.9"
    batches = {f"{speed['batch']} on {speed['device']}" for speed in speeds.values()}
    yield (
        f"\n{texts}. Seconds: batches of {', '.join(sorted(batches)) or 'unknown size'}, the median of {TIMED_RUNS} "
        "runs. Where a model is slower than another, it also has as many steps as take the other's seconds, by the "
        "measured seconds per network call. ± is one standard error over texts; for MAUVE the standard deviation over "
        "clusterings of the same texts. No error covers the training seed. Compare within a column only.\n"
    )


def _judge(card: Result) -> str:
    return Path(card["perplexity"]["judge"]["name"]).stem


def _order(card: Result) -> tuple[str, int, str]:
    made_by = card["samples"]["made_by"]
    return made_by["sampling"]["sampler"], made_by["sampling"]["steps"], made_by["model"]


def _metrics(by_judge: Mapping[str, Mapping[str, Any]], judges: list[str]) -> list[str]:
    """The cells of a line, from its card by each judge."""
    cells = [_value(by_judge[judge]["perplexity"]["pooled"], ".4g") if judge in by_judge else "" for judge in judges]
    any_card = next(iter(by_judge.values()))
    if "entropy" not in any_card:  # a reference with another tokenizer than the samples'
        return [*cells, "", "", "", ""]
    diversity = any_card["diversity"]
    cells += [_value(any_card["entropy"], ".3f"), _value(diversity["distinct"]["2"], ".3f")]
    mauves = [card["mauve"] for card in by_judge.values() if "mauve" in card]
    mauve = f"{mauves[0]['value']:.3f} ± {mauves[0]['spread']:.3f}" if mauves else ""
    return [*cells, _value(diversity["repeated"], ".4f"), mauve]


def _value(mean: Mapping[str, Any], form: str) -> str:
    error = "" if mean["stderr"] is None else f" ± {mean['stderr']:.2g}"
    return f"{mean['value']:{form}}{error}"
