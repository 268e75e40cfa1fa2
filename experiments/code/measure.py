"""Measures models of code: the bound, texts that Python can read, holes that are filled, and names that exist.

    python experiments/code/measure.py write RUN... --data PREPARED --out texts.jsonl     # on the device
    python experiments/code/measure.py score texts.jsonl --against code-mdlm              # a table; needs no model

`write` appends a line for each run: its bound on the held-out rows, 256 texts from the start of a file, and fills of
holes in held-out functions; runs that have a line are left out. Its first line is of the held-out files themselves, as
the run `held-out`: the ceiling. `score` reads the lines, adds the scores as JSON (--json) and prints
Markdown. Runs NAME-seed0, NAME-seed1, ... are averaged (not with --each); differences are those of the seeds that both
have.

texts        256 samples. A packed row that begins with bos and the eos of the document before it goes on with the start
             of a file. The text ends at the next eos, or with the row, and then without its last line, which is cut.
  readable   The share of texts that Python accepts, or finds incomplete without an error before their end.
  lines      The share of a text's lines that are before the first error: in the longest prefix that is readable.
fills        Holes of 8 to 32 tokens in functions of held-out files, with the tokens on both sides that fit into a row:
             a `statement` is one of a function's body, an `expression` is a part of one. The rest of the file is not
             changed, so after filling the file is accepted by `ast.parse` or not.
  parses     The share of fills after which the file is accepted.
  exact      The share of fills that are the missing tokens.
  tokens     The share of the tokens of a hole that are right.
names        Of the names that a text reads (`ast.Name`, load), the share that exists: bound in a scope around, at the
             module's level, or built in, by the rules of Python (`symtable`). Of texts it is of the longest prefix of
             whole lines that `ast.parse` accepts, of fills it is of names in the hole where the file is accepted.
             Files with `from x import *` are left out.

Errors are standard errors over files: the texts, or the held-out files, each the mean of its holes and of the seeds.
Differences are those of the same files.
"""

import argparse
import ast
import builtins
import json
import math
import random
import re
import symtable
import sys
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

INCOMPLETE = 0x4000  # PyCF_ALLOW_INCOMPLETE_INPUT: an error at the end of the input is called "incomplete input"
NUM_TEXTS = 256
STEPS, TOP_P = 64, 0.9
MIN_HOLE, MAX_HOLE = 8, 32
HOLES_PER_FILE = 2
"""Of each kind."""
SEED = 36
BUILT_IN = {*dir(builtins), "__file__", "__name__", "__doc__", "__path__", "__spec__", "__package__", "__class__"}
CEILING = "held-out"
Scores = dict[str, dict[str, float]]
"""Of each figure, the value of each file."""


# Holes in held-out files


@dataclass(frozen=True)
class Hole:
    file: int
    """Number of the document in the split."""
    kind: str
    start: int
    """Of the missing tokens [start, stop) in the document."""
    stop: int
    begin: int
    """Of the missing characters [begin, end) in the text of the document."""
    end: int


def holes_in(number: int, text: str, offsets: list[tuple[int, int]]) -> list[Hole]:
    """Random holes of both kinds in different functions, whose ends are ends of tokens."""
    place = places_in(text)
    first = {start + 1: index for index, (start, _) in enumerate(offsets) if text[start] == " "}  # a name and its space
    first |= {start: index for index, (start, _) in enumerate(offsets)}
    last = {stop: index + 1 for index, (_, stop) in enumerate(offsets)}
    rng, found = random.Random(f"{SEED} {number}"), list[Hole]()
    functions = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    for kind, nodes_of in (("statement", statements), ("expression", expressions)):
        of_kind = list[Hole]()
        for function in rng.sample(functions, len(functions)):
            spans = [
                (first.get(place(node.lineno, node.col_offset)), last.get(place(node.end_lineno, node.end_col_offset)))
                for node in nodes_of(function)
            ]
            fitting = [(a, b) for a, b in spans if a is not None and b is not None and MIN_HOLE <= b - a <= MAX_HOLE]
            if fitting and len(of_kind) < HOLES_PER_FILE:
                start, stop = rng.choice(fitting)
                of_kind.append(Hole(number, kind, start, stop, offsets[start][0], offsets[stop - 1][1]))
        found += of_kind
    return found


def places_in(text: str) -> Callable[[int, int], int]:
    """(line, column) of `ast`, whose columns are counted in bytes -> the number of the character in the text."""
    lines = [0]
    for line in text.splitlines(keepends=True):
        lines.append(lines[-1] + len(line))

    def place(line: int, column: int) -> int:
        begin = text[lines[line - 1] : lines[line]].encode()[:column]
        return lines[line - 1] + len(begin.decode())

    return place


def statements(function: Any) -> list[Any]:
    """The statements in the body of a function, docstrings left out."""
    nodes = [node for each in function.body for node in ast.walk(each) if isinstance(node, ast.stmt)]
    return [node for node in nodes if not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))]


def expressions(function: Any) -> list[Any]:
    """The expressions in statements of a function's body that are not literals, nor in one.

    Python 3.11 and 3.12 place what is in an f-string differently.
    """
    found, nodes = list[Any](), statements(function)
    while nodes:
        node = nodes.pop()
        if not isinstance(node, ast.JoinedStr):
            found += [node] if isinstance(node, ast.expr) and not isinstance(node, ast.Constant) else []
            nodes += ast.iter_child_nodes(node)
    return found


# What the device does: models, texts and fills


def write(arguments: argparse.Namespace) -> None:
    from adlm import load
    from adlm.data.prepare.prepared import open_prepared
    from adlm.distributed import local_device

    written = {record["run"] for record in read_lines(arguments.out)}
    prepared = open_prepared(arguments.data)
    documents, tokenizer = held_out_documents(prepared, arguments.files), prepared.tokenizer
    num_tokens = prepared.manifest["length"] - 3  # of a text
    files, holes = {number: tokenizer.decode(ids) for number, ids in documents.items()}, list[Hole]()
    for number, text in files.items():
        [(same, offsets)] = tokenizer.encode_with_offsets([text])
        if same == documents[number] and len(same) > num_tokens:
            holes += holes_in(number, text, offsets)
    with arguments.out.open("a") as out:

        def add(record: dict[str, Any]) -> None:
            out.write(json.dumps(record) + "\n")
            out.flush()

        if CEILING not in written:
            texts = [
                {"text": tokenizer.decode(ids[:num_tokens]), "ends": len(ids) <= num_tokens}
                for ids in documents.values()
            ]
            missing = [documents[hole.file][hole.start : hole.stop] for hole in holes]
            add(
                {
                    "run": CEILING,
                    "files": files,
                    "texts": texts,
                    "fills": fill_records(tokenizer, holes, missing, missing),
                }
            )
        for run in arguments.runs:
            if run.name in written:
                continue
            lm = load(run, local_device("auto"))
            assert lm.require_tokenizer().sha256 == tokenizer.sha256, f"{run} has another tokenizer than the text"
            texts = sample_texts(lm, arguments.num, arguments.batch)
            missing = [documents[hole.file][hole.start : hole.stop] for hole in holes]
            filled = fill_holes(lm, documents, holes, arguments.batch)
            fills = fill_records(tokenizer, holes, missing, filled)
            bound = held_out_bound(lm, arguments.data, arguments.samples)
            add({"run": run.name, **bound, "texts": texts, "fills": fills})
            print(f"{run.name}: {bound['nats']:.4f} nats, {len(texts)} texts, {len(fills)} fills", flush=True)


def held_out_documents(prepared: Any, num_files: int | None) -> dict[int, list[int]]:
    """The ids of held-out files, without the eos after each."""
    tokens = prepared.tokens("valid")
    documents = {}
    for number in range(min(num_files or tokens.extent.documents, tokens.extent.documents)):
        start, stop = tokens.document(number)
        ids = np.zeros(stop - start, np.int64)
        tokens.copy_to(ids, start, stop)
        documents[number] = ids[:-1].tolist()
    return documents


def held_out_bound(lm: Any, data: Path, samples: int) -> dict[str, float]:
    from adlm.likelihood.measurement import measure_nats
    from adlm.likelihood.settings import PerplexitySettings
    from adlm.likelihood.standard_errors import summarize
    from adlm.likelihood.text_sets import text_sets

    with text_sets([str(data)], lm.require_tokenizer(), lm.config.length, split="valid") as sets:
        estimate = summarize(measure_nats(lm.method, lm.network, sets[0].rows, PerplexitySettings(samples=samples)))
    return {"nats": estimate.nats, "nats_stderr": estimate.stderr or math.nan}


def sampled(lm: Any, canvas: list[list[int]], batch: int) -> Iterator[list[int]]:
    """The rows of a canvas, filled."""
    import torch

    from adlm.canvas import Canvas
    from adlm.sampling.frame import last_frame
    from adlm.sampling.settings import SampleSettings

    sampling = lm.sampling(sampler="ancestral", steps=STEPS, top_p=TOP_P)
    for first in range(0, len(canvas), batch):
        rows = Canvas(torch.tensor(canvas[first : first + batch]))
        run = lm.plan(SampleSettings(sampling, canvas=rows, seed=SEED + first))
        yield from last_frame(run.frames()).ids.tolist()


def sample_texts(lm: Any, num: int, batch: int) -> list[dict[str, Any]]:
    vocabulary, length, tokenizer = lm.config.vocabulary, lm.config.length, lm.require_tokenizer()
    prefix = [vocabulary.bos_id, vocabulary.eos_id]
    canvas = [[*prefix, *[lm.mask_id] * (length - 3), vocabulary.eos_id]] * num
    texts = []
    for row in sampled(lm, canvas, batch):
        ids = row[2:-1]
        ends = vocabulary.eos_id in ids
        ids = ids[: ids.index(vocabulary.eos_id)] if ends else ids
        texts.append({"text": tokenizer.decode(ids), "ends": ends})
    return texts


def fill_holes(lm: Any, documents: dict[int, list[int]], holes: list[Hole], batch: int) -> list[list[int]]:
    """The tokens that the model writes into each hole; the row has as much text before it as after it, if there is."""
    vocabulary, width = lm.config.vocabulary, lm.config.length - 2
    canvas, places = [], []
    for hole in holes:
        ids = documents[hole.file]
        begin = min(max(0, (hole.start + hole.stop - width) // 2), len(ids) - width)
        row = [vocabulary.bos_id, *ids[begin : begin + width], vocabulary.eos_id]
        place = hole.start - begin + 1
        row[place : place + hole.stop - hole.start] = [lm.mask_id] * (hole.stop - hole.start)
        canvas.append(row)
        places.append((place, place + hole.stop - hole.start))
    return [row[start:stop] for row, (start, stop) in zip(sampled(lm, canvas, batch), places, strict=True)]


def fill_records(
    tokenizer: Any, holes: list[Hole], missing: list[list[int]], filled: list[list[int]]
) -> list[dict[str, Any]]:
    return [
        {
            **asdict(hole),
            "num_tokens": len(ids),
            "num_right": sum(one == other for one, other in zip(right, ids, strict=True)),
            "fill": tokenizer.decode(ids),
        }
        for hole, right, ids in zip(holes, missing, filled, strict=True)
    ]


# What needs no device: scores


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def error_of(text: str) -> str:
    """The error of Python, "" for none, "incomplete input" if only the rest of the program is missing."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            compile(text, "", "exec", ast.PyCF_ONLY_AST | INCOMPLETE)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        return str(getattr(error, "msg", error)) or "error"
    return ""


def is_readable(text: str, ends: bool) -> bool:
    """Whether the text is a program, or where it is not its end, the beginning of one."""
    return error_of(text) in (("",) if ends else ("", "incomplete input"))


def longest_prefix(lines: list[str], is_good: Callable[[str], bool]) -> str:
    """The longest prefix of whole lines that is good."""
    return next((text for num in range(len(lines), 0, -1) if is_good(text := "".join(lines[:num]))), "")


def missing_names(text: str) -> set[str] | None:
    """The names that a program reads and that no scope binds; None if `import *` may bind any."""
    if re.search(r"^\s*from\s.*import\s*\*", text, re.M):
        return None
    try:
        module = symtable.symtable(text, "", "exec")
    except (SyntaxError, ValueError, RecursionError):
        return None
    known = {symbol.get_name() for symbol in module.get_symbols() if symbol.is_assigned() or symbol.is_imported()}
    missing, scopes = set[str](), [module]
    while scopes:
        scope = scopes.pop()
        scopes += scope.get_children()
        known |= {s.get_name() for s in scope.get_symbols() if s.is_declared_global() and s.is_assigned()}
        missing |= {
            s.get_name() for s in scope.get_symbols() if s.is_referenced() and (s.is_global() or scope is module)
        }
    return missing - known - BUILT_IN


def known_share(text: str, start: int = 0, stop: int | None = None) -> float | None:
    """The share of names read in the characters [start, stop) of a program that exist; None if there are none."""
    missing = missing_names(text)
    if missing is None:
        return None
    stop, place = len(text) if stop is None else stop, places_in(text)
    read = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)]
    names = [node.id not in missing for node in read if start <= place(node.lineno, node.col_offset) < stop]
    return sum(names) / len(names) if names else None


def scores_of(record: dict[str, Any], files: dict[str, str]) -> Scores:
    """Of each figure, the value of each file; files without a value are left out. `files` are the held-out texts."""
    values: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for number, sample in enumerate(record["texts"]):
        lines = sample["text"].splitlines(keepends=True)
        if not sample["ends"]:
            lines = lines[:-1]
        found: dict[str, float | None] = {"readable": float(is_readable("".join(lines), sample["ends"]))}
        before_error = longest_prefix(lines, lambda text: is_readable(text, False))
        found["lines"] = len(before_error.splitlines()) / len(lines) if lines else 0.0
        found["names"] = known_share(longest_prefix(lines, lambda text: error_of(text) == ""))
        for name, value in found.items():
            if value is not None:
                values[f"text {name}"][str(number)].append(value)
    for fill in record["fills"]:
        whole, begin = files[str(fill["file"])], fill["begin"]
        text = whole[:begin] + fill["fill"] + whole[fill["end"] :]
        parses = error_of(text) == ""
        found = {
            "parses": float(parses),
            "exact": float(fill["num_right"] == fill["num_tokens"]),
            "tokens": fill["num_right"] / fill["num_tokens"],
            "names": known_share(text, begin, begin + len(fill["fill"])) if parses else None,
        }
        for name, value in found.items():
            if value is not None:
                values[f"{fill['kind']} {name}"][str(fill["file"])].append(value)
    return {name: {file: float(np.mean(each)) for file, each in of_files.items()} for name, of_files in values.items()}


def averaged(scores: list[Scores]) -> Scores:
    """The mean of several seeds for each file."""
    merged: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for each in scores:
        for name, of_files in each.items():
            for file, value in of_files.items():
                merged[name][file].append(value)
    return {name: {file: float(np.mean(v)) for file, v in of_files.items()} for name, of_files in merged.items()}


def mean_and_error(values: list[float]) -> tuple[float, float]:
    spread = float(np.std(values, ddof=1) / len(values) ** 0.5) if len(values) > 1 else math.nan
    return float(np.mean(values)) if values else math.nan, spread


def score(arguments: argparse.Namespace) -> None:
    groups: dict[str, list[dict[str, Any]]] = defaultdict(list)
    records = read_lines(arguments.texts)
    files = next(record["files"] for record in records if record["run"] == CEILING)
    of_seeds: dict[str, dict[str, Scores]] = defaultdict(dict)
    for record in records:
        group = record["run"] if arguments.each else re.sub(r"-seed\d+$", "", record["run"])
        groups[group].append(record)
        of_seeds[group][record["run"].removeprefix(group)] = scores_of(record, files)
    scores = {group: averaged(list(of_group.values())) for group, of_group in of_seeds.items()}
    figures = list(dict.fromkeys(name for of_run in scores.values() for name in of_run))
    report: dict[str, Any] = {}
    for group, of_group in scores.items():
        nats = {record["run"]: record["nats"] for record in groups[group] if "nats" in record}
        report[group] = {"seeds": len(groups[group]), "nats": nats}
        report[group] |= {name: mean_and_error(list(values.values())) for name, values in of_group.items()}
        if arguments.against in scores and group not in (arguments.against, CEILING):
            common = of_seeds[group].keys() & of_seeds[arguments.against].keys()
            ours, other = (averaged([of_seeds[of][seed] for seed in common]) for of in (group, arguments.against))
            report[group]["difference"] = {
                name: mean_and_error([values[file] - other[name][file] for file in values if file in other[name]])
                for name, values in ours.items()
                if values.keys() & other.get(name, {}).keys()
            }
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")
    sys.stdout.write(table(report, figures, arguments.against))


def table(report: dict[str, Any], figures: list[str], against: str) -> str:
    def shown(pair: tuple[float, float] | None, sign: str = "") -> str:
        return "" if pair is None else f"{100 * pair[0]:{sign}.1f} ± {100 * pair[1]:.1f}"

    lines = [f"| percent | nats | {' | '.join(figures)} |", "|---" * (len(figures) + 2) + "|"]
    for group, found in report.items():
        nats = "" if not found["nats"] else f"{np.mean(list(found['nats'].values())):.4f}"
        lines.append(f"| {group} | {nats} | " + " | ".join(shown(found.get(name)) for name in figures) + " |")
    compared = {group: found for group, found in report.items() if "difference" in found}
    if compared:
        lines += ["", f"| minus {against} | nats | {' | '.join(figures)} |", "|---" * (len(figures) + 2) + "|"]
    for group, found in compared.items():
        others = report[against]["nats"]
        pairs = [(value, others.get(run.replace(group, against, 1))) for run, value in found["nats"].items()]
        mean, error = mean_and_error([one - other for one, other in pairs if other is not None])
        cells = " | ".join(shown(found["difference"].get(name), "+") for name in figures)
        lines.append(f"| {group} | {mean:+.4f} ± {error:.4f} | {cells} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    writing = commands.add_parser("write", help="texts and fills of trained runs")
    writing.add_argument("runs", type=Path, nargs="*", help="folders of runs (default: only the held-out files)")
    writing.add_argument("--data", type=Path, required=True, help="prepared folder of the runs")
    writing.add_argument("--out", type=Path, required=True, help="JSON lines; runs that it has are left out")
    writing.add_argument("--num", type=int, default=NUM_TEXTS, help="texts of each run")
    writing.add_argument("--files", type=int, help="only the first held-out files (default: all)")
    writing.add_argument("--batch", type=int, default=256, help="rows sampled at once")
    writing.add_argument("--samples", type=int, default=4, help="replicates of the bound")
    scoring = commands.add_parser("score", help="the figures of written texts and fills")
    scoring.add_argument("texts", type=Path)
    scoring.add_argument("--against", default="", help="a run, without its seed, that the others are compared with")
    scoring.add_argument("--each", action="store_true", help="every run by itself, not averaged over seeds")
    scoring.add_argument("--json", type=Path, help="where the figures are written")
    arguments = parser.parse_args()
    {"write": write, "score": score}[arguments.command](arguments)


if __name__ == "__main__":
    main()
