"""`adlm prepare`: any text becomes a folder of ids to train on and to measure with."""

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from adlm.cli.console import Console
from adlm.config.load import resolve
from adlm.config.schema import SOURCES, Config
from adlm.data.prepare.prepare import PrepareOutcome, prepare
from adlm.data.prepare.prepare import PrepareProgress as Reached
from adlm.data.prepare.prepared import Prepared, open_prepared
from adlm.data.rows.packing import Rows
from adlm.data.rows.statistics import Statistics, anchors_in, statistics_of
from adlm.data.sources.corpora import CORPORA
from adlm.errors import UserError, printable
from adlm.tokens import Tokenizer

EXAMPLE = """adlm prepare data=wikitext2 tokenizer=gpt2 length=1024 --out prepared/wikitext2
  adlm prepare data.path='texts/*.jsonl.gz' data.field=body tokenizer=gpt2 --out prepared/own --inspect"""
SHOWN = 3  # rows that --inspect prints
SHOWN_TOKENS = 160  # of each


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "words",
        nargs="*",
        metavar="WORD",
        help="data=NAME, data.path=FILE_OR_GLOB or data.hub=OWNER/NAME, then tokenizer=..., length=...\n"
        "and other knobs, or a preset (see adlm presets --explain)",
    )
    parser.add_argument("--out", metavar="DIR", type=Path, help="where the prepared folder goes, or is")
    parser.add_argument(
        "--inspect", action="store_true", help="show some rows, lengths, frequencies, anchors (also of a DIR there is)"
    )
    parser.add_argument("--list", action="store_true", help="list the corpora known by name")
    parser.add_argument("--json", action="store_true", help="for machines")


def run(arguments: argparse.Namespace) -> int:
    if arguments.list:
        return _list(arguments.json)
    if arguments.out is None:
        raise UserError("--out is not given: say where the prepared folder goes")
    started = time.monotonic()
    config = resolve(arguments.words)
    if any(getattr(config.data, knob) for knob in SOURCES):
        outcome = _prepared(config, arguments)
        prepared, how, missing = outcome.prepared, outcome.how, outcome.missing
    elif arguments.inspect:
        prepared, how, missing = _opened(config, arguments), "opened", ()
    else:
        raise UserError("nothing says what to read; give data=NAME, data.path=FILE or data.hub=OWNER/NAME")
    report = _report(prepared, how, missing, time.monotonic() - started)
    report["notes"] = [] if how == "opened" else list(_notes(config, report, prepared.manifest["recipe"]["held_out"]))
    splits = prepared.splits if arguments.inspect else ()
    seen = {split: statistics_of(prepared.rows(split), config.anchor.tau) for split in splits}
    if arguments.inspect:
        report["statistics"] = {split: asdict(statistics) for split, statistics in seen.items()}
    if arguments.json:
        sys.stdout.write(f"{json.dumps(report)}\n")
        return 0
    console = Console()
    _tell(console, report)
    for split, statistics in seen.items():
        _inspect(console, prepared, split, statistics, config.anchor.tau)
    return 0


def _list(as_json: bool) -> int:
    titles = {name: corpus.title for name, corpus in CORPORA.items()}
    width = max(map(len, titles))
    text = "".join(f"{name:{width}}  {title}\n" for name, title in titles.items())
    sys.stdout.write(f"{json.dumps(titles)}\n" if as_json else text)
    return 0


def _prepared(config: Config, arguments: argparse.Namespace) -> PrepareOutcome:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[rate]:.1f} MB/s  {task.fields[tokens]:,} tokens "),
        TimeRemainingColumn(),
    )
    started = time.monotonic()
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("tokenising", total=None, rate=0.0, tokens=0)

        def show(progress: Reached) -> None:
            rate = progress.characters / 1e6 / max(1e-9, time.monotonic() - started)
            total = progress.bytes_in_all or None
            bar.update(task, completed=progress.bytes_read, total=total, rate=rate, tokens=progress.tokens)

        try:
            return prepare(config, arguments.out, show)
        except KeyboardInterrupt:
            bar.stop()
            sys.stderr.write("adlm: interrupted; run the same command again to go on\n")
            raise


def _opened(config: Config, arguments: argparse.Namespace) -> Prepared:
    """A folder there is, in rows of its own length and packing unless the words of the command say otherwise."""
    prepared = open_prepared(arguments.out)
    asked = {"length": ("length", config.length), "data.packing": ("packing", config.data.packing)}
    given = {word.partition("=")[0] for word in arguments.words}
    view = dict(entry for knob, entry in asked.items() if knob in given and entry[1])
    return replace(prepared, manifest={**prepared.manifest, **view})


def _notes(config: Config, report: dict[str, Any], division: dict[str, Any]) -> Iterator[str]:
    """What someone may not have expected."""
    for split in report["missing"]:
        yield f"not there: {split}"
    if config.data.path and division["last_from"] is not None:
        share = report["splits"]["valid"]["tokens"] / report["tokens"]
        where = "at a document" if division["cut_at"] is None else "inside a document"
        yield f"held out: the last {share:.1%} of the text, cut {where}; there are too few documents to draw some"
    elif config.data.held_out and set(report["splits"]) == {"train"} and not report["missing"]:
        text = f"{report['tokens']:,} tokens in {report['documents']:,} documents"
        yield f"nothing is held out: data.held_out {config.data.held_out:g} of {text} is too little; give a larger one"


def _report(prepared: Prepared, how: str, missing: tuple[str, ...], seconds: float) -> dict[str, Any]:
    """Counts for machines."""
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


def _tell(console: Console, report: dict[str, Any]) -> None:
    table = Table("split", "documents", "tokens", "rows", "tokens in rows", box=None, pad_edge=False)
    for column in table.columns[1:]:
        column.justify = "right"
    for split, counts in report["splits"].items():
        table.add_row(split, *(f"{value:,}" for value in counts.values()))
    console.print(table)
    console.print(
        f"{report['how']} in {report['seconds']:.1f} s: {report['folder']}, rows of {report['length']} by "
        f"{report['packing']}, {report['vocabulary']:,} symbols as {report['dtype']}",
    )
    for note in report["notes"]:
        console.print(note, style="dim")


def _inspect(console: Console, prepared: Prepared, split: str, seen: Statistics, tau: int) -> None:
    rows, tokenizer = prepared.rows(split), prepared.tokenizer
    console.print(Text.assemble("\n", (split, "bold"), f": {_in_words(seen, tau)}"))
    frequent = Text("most frequent: ")
    for index, share in seen.most_frequent:
        frequent.append(repr(tokenizer.decode([index])), style="cyan")
        frequent.append(f" {share:.1%}  ", style="dim")
    console.print(frequent)
    legend = Text("special tokens ", style="bold magenta")
    legend.append(f"anchors (at most {tau} times in the row)", style="bold yellow")
    console.print(legend)
    for row in sorted({round(i * (len(rows) - 1) / max(1, SHOWN - 1)) for i in range(SHOWN)}):
        console.print(f"row {row:,} of {len(rows):,}", style="dim")
        console.print(_coloured(rows, row, prepared, tau))


def _in_words(seen: Statistics, tau: int) -> str:
    low, tenth, middle, ninetieth, high = seen.document_lengths
    return (
        f"{seen.num_documents:,} documents of {low:,} to {high:,} tokens (median {middle:,}, 80% between {tenth:,} and "
        f"{ninetieth:,}), {seen.distinct:,} different ids in {seen.sampled_tokens:,} tokens looked at; "
        f"{seen.anchors:.1%} are anchors at tau {tau}, {seen.padding:.1%} of the rows is padding"
    )


def _coloured(rows: Rows, row: int, prepared: Prepared, tau: int) -> Text:
    """The beginning of a row, decoded token by token."""
    vocabulary = prepared.tokenizer.vocabulary
    special = {vocabulary.bos_id, vocabulary.eos_id, vocabulary.pad_id, vocabulary.mask_id}
    ids, pad = rows[row]
    anchors = anchors_in(ids[None], pad[None], tau, vocabulary.size)[0]
    shown = Text()
    text = ids[~pad]
    beginning = text.tolist()[:SHOWN_TOKENS]
    tokens = _one_by_one(prepared.tokenizer, beginning)
    for index, token, is_anchor in zip(beginning, tokens, anchors[~pad][:SHOWN_TOKENS], strict=True):
        style = "bold magenta" if index in special else "bold yellow" if is_anchor else ""
        shown.append(printable(token), style=style)
    if len(text) > SHOWN_TOKENS:
        shown.append(f" ... {len(text) - SHOWN_TOKENS} more", style="dim")
    if pad.any():
        shown.append(f" and {pad.sum()} of padding", style="dim")
    return shown


def _one_by_one(tokenizer: Tokenizer, ids: Sequence[int]) -> Iterator[str]:
    """What each id adds to the text after the one before it: a decoder may put a space between two words."""
    before: list[int] = []
    for index in ids:
        first, both = tokenizer.decode(before), tokenizer.decode([*before, index])
        yield both.removeprefix(first) if both.startswith(first) else tokenizer.decode([index])
        before = [index]
