"""`adlm prepare`: tokenize text into a prepared folder for training and evaluation."""

import codecs
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from adlm.cli.console import Console
from adlm.config.load import resolve
from adlm.config.schema import SOURCES, Config
from adlm.data.prepare.prepare import PrepareOutcome, PrepareProgress, prepare
from adlm.data.prepare.prepared import Prepared, open_prepared
from adlm.data.rows.packing import Rows
from adlm.data.sources.corpora import CORPORA
from adlm.errors import UserError, printable
from adlm.request import Request, option
from adlm.tokens import Tokenizer

if TYPE_CHECKING:  # --inspect imports torch, which takes seconds; nothing else here does
    from adlm.apps.reasoning.inspection import InspectedProblem, InspectedProblems
    from adlm.data.rows.anchor_rules import AnchorRule, Statistics

NUM_SHOWN_ROWS = 3  # printed by --inspect
NUM_SHOWN_TOKENS = 160  # of each row
FIELD_WIDTH = 10  # of "question" and the other names of a problem's parts


@dataclass(frozen=True)
class PrepareRequest(Request):
    """The options of `adlm prepare`."""

    example = """adlm prepare data=wikitext2 tokenizer=gpt2 length=1024 --out prepared/wikitext2
  adlm prepare data.path='texts/*.jsonl.gz' data.field=body tokenizer=gpt2 --out prepared/own --inspect
  adlm prepare init=smollm2-base data.path=pairs.jsonl data.format=pairs length=512 --out prepared/chat"""

    overrides: tuple[str, ...] = option(
        "data=NAME, data.path=FILE_OR_GLOB or data.hub=OWNER/NAME, then tokenizer=..., length=...\n"
        "and other config options, or a preset (see adlm presets --explain)",
        (),
        positional=True,
    )
    out: Path | None = option("the prepared folder to create, or an existing one with --inspect", None, metavar="DIR")
    inspect: bool = option(
        "show example rows, document lengths, token frequencies and anchors;\n"
        "of reasoning problems also steps, labels and what each slot is trained towards",
        False,
    )
    list: bool = option("list the named corpora", False)
    json: bool = option("print JSON", False)


def run(request: PrepareRequest) -> int:
    if request.list:
        titles = {name: corpus.title for name, corpus in CORPORA.items()}
        width = max(map(len, titles))
        text = "".join(f"{name:{width}}  {title}\n" for name, title in titles.items())
        sys.stdout.write(f"{json.dumps(titles)}\n" if request.json else text)
        return 0
    if request.out is None:
        raise UserError("--out is not given; add --out DIR for the prepared folder")
    started = time.monotonic()
    config = resolve(request.overrides)
    if any(getattr(config.data, option) for option in SOURCES):
        outcome = _prepare(config, request.out)
        prepared, how, missing, notes = outcome.prepared, outcome.how, outcome.missing, outcome.notes
    elif request.inspect:
        prepared, how, missing, notes = _open(config, request.out, request.overrides), "opened", (), ()
    else:
        raise UserError("no text is given; add data=NAME, data.path=FILE or data.hub=OWNER/NAME")
    report = _report(prepared, how, missing, time.monotonic() - started)
    report["notes"] = [*notes, *(note for split in prepared.splits for note in prepared.rows(split).notes())]
    if how != "opened":
        report["notes"] += _notes(config, report, prepared.manifest["recipe"]["held_out"])
    print_examples = _inspect(config, prepared, report) if request.inspect else lambda console: None
    if request.json:
        sys.stdout.write(f"{json.dumps(report)}\n")
    else:
        console = Console()
        _print_report(console, report)
        print_examples(console)
    return 0


def _inspect(config: Config, prepared: Prepared, report: dict[str, Any]) -> Callable[[Console], None]:
    """Add the statistics and reasoning problems of every split to the report; returns what prints them."""
    from adlm.data.rows.anchor_rules import anchor_rule, describe_rule, statistics_of, symbol_statistics

    rule = None  # the labels
    if config.anchor.rule != "syntax" or prepared.labels == "none":
        rule = anchor_rule(
            config.anchor,
            prepared.tokenizer.vocabulary.size,
            lambda: symbol_statistics(prepared.rows(prepared.splits[0]), prepared.tokenizer),
        )
    statistics = {split: statistics_of(prepared.rows(split), rule) for split in prepared.splits}
    problems, notes = _inspect_problems(config, prepared, report["how"])
    report["notes"] += notes
    report["statistics"] = {split: asdict(found) for split, found in statistics.items()}
    report["problems"] = {split: asdict(found) for split, found in problems.items()}

    def print_examples(console: Console) -> None:
        for split, found in statistics.items():
            num_rows = 1 if split in problems else NUM_SHOWN_ROWS  # the rows of problems are the problems
            _print_examples(console, prepared, split, found, rule, describe_rule(config.anchor), num_rows)
            if split in problems:
                _print_problems(console, problems[split], report["splits"][split]["documents"])

    return print_examples


def _prepare(config: Config, out: Path) -> PrepareOutcome:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[rate]:.1f} MB/s  {task.fields[tokens]:,} tokens "),
        TimeRemainingColumn(),
    )
    started = time.monotonic()
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_live) as bar:
        task = bar.add_task("tokenizing", total=None, rate=0.0, tokens=0)

        def show(progress: PrepareProgress) -> None:
            rate = progress.characters / 1e6 / max(1e-9, time.monotonic() - started)
            total = progress.bytes_in_all or None
            bar.update(task, completed=progress.bytes_read, total=total, rate=rate, tokens=progress.tokens)

        try:
            return prepare(config, out, show)
        except KeyboardInterrupt:
            bar.stop()
            sys.stderr.write("adlm: interrupted; rerun the same command to resume\n")
            raise


def _open(config: Config, out: Path, overrides: Sequence[str]) -> Prepared:
    """An existing prepared folder, with its own row length and packing unless the command line overrides them."""
    prepared = open_prepared(out)
    fields = {"length": ("length", config.length), "data.packing": ("packing", config.data.packing)}
    given = {override.partition("=")[0] for override in overrides}
    view = dict(entry for option, entry in fields.items() if option in given and entry[1])
    return replace(prepared, manifest={**prepared.manifest, **view})


def _inspect_problems(config: Config, prepared: Prepared, how: str) -> tuple[dict[str, "InspectedProblems"], list[str]]:
    """The reasoning problems of each split, where the source has any; else, where the folder has any, a note."""
    from adlm.apps.reasoning.inspection import inspect_problems
    from adlm.apps.reasoning.problems import problem_sets

    source = prepared.manifest["source"]
    if how == "opened":
        note = (
            "labels and slots are shown when the source is named: repeat the command that prepared the folder "
            f"(data={source} ...) with --inspect"
        )
        return {}, [note] if source in problem_sets() else []
    if config.data.name not in problem_sets():
        return {}, []
    try:
        return inspect_problems(config, prepared.tokenizer, prepared.splits), []
    except UserError as error:
        return {}, [f"problems, labels and slots are not shown: {error}"]


def _notes(config: Config, report: dict[str, Any], division: dict[str, Any]) -> Iterator[str]:
    """Warnings about results that a user may not expect."""
    for split in report["missing"]:
        yield f"split not found: {split}"
    if config.data.path and division["last_from"] is not None:
        share = report["splits"]["valid"]["tokens"] / report["tokens"]
        where = "between documents" if division["cut_at"] is None else "inside a document"
        yield (
            f"held out: the last {share:.1%} of the text, cut {where}; there are too few documents to hold out "
            "random ones"
        )
    elif config.data.held_out and set(report["splits"]) == {"train"} and not report["missing"]:
        text = f"{report['tokens']:,} tokens in {report['documents']:,} documents"
        yield (
            f"no text is held out: data.held_out {config.data.held_out:g} of {text} selects no document; "
            "use a larger value, or more text"
        )


def _report(prepared: Prepared, how: str, missing: tuple[str, ...], seconds: float) -> dict[str, Any]:
    """The report that --json prints."""
    manifest = prepared.manifest
    splits = {}
    for split, entry in manifest["splits"].items():
        rows = prepared.rows(split)
        splits[split] = {
            "documents": entry["documents"],
            "tokens": entry["tokens"],
            "rows": len(rows),
            "tokens_in_rows": rows.num_tokens,
        }
    return {
        "folder": str(prepared.folder),
        "source": manifest["source"],
        "how": how,
        "length": manifest["length"],
        "packing": manifest["packing"],
        "vocabulary": prepared.tokenizer.vocabulary.size,
        "dtype": manifest["recipe"]["dtype"],
        "documents": sum(split["documents"] for split in splits.values()),
        "tokens": sum(split["tokens"] for split in splits.values()),
        "splits": splits,
        "missing": list(missing),
        "seconds": round(seconds, 3),
    }


def _print_report(console: Console, report: dict[str, Any]) -> None:
    table = Table("split", "documents", "tokens", "rows", "tokens in rows", box=None, pad_edge=False)
    for column in table.columns[1:]:
        column.justify = "right"
    for split, counts in report["splits"].items():
        table.add_row(split, *(f"{value:,}" for value in counts.values()))
    console.print(table)
    console.print(
        f"{report['how']} in {report['seconds']:.1f} s: {report['folder']}, rows of {report['length']} tokens, "
        f"packing {report['packing']}, vocabulary of {report['vocabulary']:,} as {report['dtype']}",
    )
    for note in report["notes"]:
        console.print(note, style="dim")


def _print_examples(
    console: Console,
    prepared: Prepared,
    split: str,
    statistics: "Statistics",
    rule: "AnchorRule | None",
    rule_in_words: str,
    num_rows: int,
) -> None:
    rows, tokenizer = prepared.rows(split), prepared.tokenizer
    shortest, tenth, median, ninetieth, longest = statistics.document_lengths
    line = (
        f": {statistics.num_documents:,} documents of {shortest:,} to {longest:,} tokens (median {median:,}, 80% "
        f"between {tenth:,} and {ninetieth:,}), {statistics.distinct:,} distinct ids in {statistics.sampled_tokens:,} "
        f"sampled tokens; {statistics.anchors:.1%} are anchors ({rule_in_words}), {statistics.padding:.1%} of the rows "
        "are padding"
    )
    console.print(Text.assemble("\n", (split, "bold"), line))
    frequent = Text("most frequent: ")
    for index, share in statistics.most_frequent:
        frequent.append(repr(tokenizer.decode([index])), style="cyan")
        frequent.append(f" {share:.1%}  ", style="dim")
    console.print(frequent)
    legend = Text("special tokens ", style="bold magenta")
    braces, marked = console.color_system is None or console.no_color, f"anchors ({rule_in_words})"
    if rows.given([0]) is not None:
        marked = "answers (what is learnt; the rest is given)"
    legend.append("{" + marked.replace(" (", "} (", 1) if braces else marked, style="bold yellow")
    console.print(legend)
    for row in sorted({round(i * (len(rows) - 1) / max(1, num_rows - 1)) for i in range(num_rows)}):
        console.print(f"row {row:,} of {len(rows):,}", style="dim")
        console.print(_highlight(rows, row, prepared, rule, braces))


def _highlight(rows: Rows, row: int, prepared: Prepared, rule: "AnchorRule | None", braces: bool) -> Text:
    """The first tokens of a row, with special tokens and anchors highlighted; in rows of pairs, answers instead of
    anchors. With `braces`, which need no colours, neighbours among these are also enclosed in a pair of them."""
    from adlm.data.rows.anchor_rules import anchors_in

    vocabulary = prepared.tokenizer.vocabulary
    special = {vocabulary.bos_id, vocabulary.eos_id, vocabulary.pad_id, vocabulary.mask_id}
    ids, pad = rows[row]
    given = rows.given([row])
    marked = anchors_in(rows, [row], rule)[0] if given is None else ~given[0]
    highlighted = Text()
    text = ids[~pad]
    beginning = text.tolist()[:NUM_SHOWN_TOKENS]
    tokens = _decode_each(prepared.tokenizer, beginning)
    shown = [*zip(beginning, tokens, marked[~pad][:NUM_SHOWN_TOKENS], strict=True)]
    for is_anchor, run in groupby(shown, lambda entry: bool(entry[2]) and entry[0] not in special):
        if not is_anchor:
            for index, token, _ in run:
                highlighted.append(printable(token), style="bold magenta" if index in special else "")
            continue
        neighbours = "".join(printable(token) for _, token, _ in run)
        word = neighbours.lstrip(" ")
        highlighted.append(" " * (len(neighbours) - len(word)))
        highlighted.append(f"{{{word}}}" if braces else word, style="bold yellow")
    if len(text) > NUM_SHOWN_TOKENS:
        highlighted.append(f" ... {len(text) - NUM_SHOWN_TOKENS} more", style="dim")
    if pad.any():
        highlighted.append(f" and {pad.sum()} padding tokens", style="dim")
    return highlighted


def _decode_each(tokenizer: Tokenizer, ids: Sequence[int]) -> Iterator[str]:
    """The text that each id adds after the id before it; a character of several ids comes with the last of them."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    for number, index in enumerate(ids):
        yield decoder.decode(tokenizer.piece(index) if number else tokenizer.decode([index]).encode())


def _print_problems(console: Console, found: "InspectedProblems", num_problems: int) -> None:
    statistics = found.statistics
    read = statistics.num_problems
    some = f"the first {read:,} of " if read < num_problems else ""
    counts = Text(f"\nproblems: {some}{num_problems:,}, {statistics.without_steps:,} without steps; problems by steps:")
    for number, count in statistics.steps.items():
        counts.append(f"  {number}", style="cyan")
        counts.append(f" ({count:,})", style="dim")
    console.print(counts)
    fewest, tenth, median, ninetieth, most = statistics.label_quantiles
    spread = f"{fewest} to {most} per problem (median {median}, 80% between {tenth} and {ninetieth})"
    console.print(
        f"labels: {statistics.num_labels:,}, {spread if fewest < most else f'{most} per problem'}; "
        f"{statistics.problems_beyond_slots:,} problems have more labels than the {found.num_slots} slots of acot"
    )
    console.print(
        f"targets: the first token of each label, {statistics.distinct_targets:,} distinct for "
        f"{statistics.distinct_labels:,} distinct labels; {statistics.split_share:.1%} of the labels are split into "
        f"several tokens ({statistics.problems_with_split:,} problems)"
    )
    for problem in found.examples:
        console.print(f"\nproblem {problem.number:,} of {num_problems:,}", style="dim")
        _print_problem(console, problem, found.num_slots)


def _print_problem(console: Console, problem: "InspectedProblem", num_slots: int) -> None:
    _print_field(console, "question", Text(problem.question))
    for number, step in enumerate(problem.steps, 1):
        _print_field(console, f"step {number}", Text(step))
    if not problem.steps:
        _print_field(console, "steps", Text("none"))
    _print_field(console, "answer", Text(problem.answer))
    labels = Text(" ".join(label.text for label in problem.labels[:num_slots]))
    if rest := problem.labels[num_slots:]:
        labels.append(f" (no slot for {' '.join(label.text for label in rest)})", style="dim")
    _print_field(console, "labels", labels if problem.labels else Text("none"))
    table = Table("slot", "target", "label", "", box=None, pad_edge=False)
    for slot in problem.slots:
        label = slot.label
        if label is not None:
            tokens = " ".join(map(repr, label.tokens))
            style = "yellow" if label.is_split else "cyan"
            note = f"split: {tokens}" if label.is_split else ""
            table.add_row(slot.position, Text(repr(slot.target), style), label.text, Text(note, style))
        elif slot.target is not None:
            table.add_row(slot.position, Text(slot.target, "bold magenta"))
    if idle := [slot.position for slot in problem.slots if slot.target is None]:
        positions = idle[0] if len(idle) == 1 else f"{idle[0]} to {idle[-1]}"
        table.add_row(positions, Text("no loss", "dim"))
    if problem.slots:
        console.print(table)


def _print_field(console: Console, name: str, text: Text) -> None:
    """A name and a text, whose lines are indented alike."""
    lines = text.wrap(console, max(20, console.width - FIELD_WIDTH))
    console.print(Text.assemble((f"{name:{FIELD_WIDTH}}", "bold"), Text(f"\n{'':{FIELD_WIDTH}}").join(lines)))
