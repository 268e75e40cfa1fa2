"""Texts from records in JSON, CSV, TSV and parquet. Independent of paths and compression."""

import csv
import json
import re
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import IO, Any, NamedTuple

from adlm.errors import UserError

LONGEST_LINE = 2**29  # characters; one line or one JSON list of records is held in memory


class Record(NamedTuple):
    text: str
    where: str
    """Its location for error messages: line 3 of a.jsonl."""


def lines_of(blocks: Iterable[str], name: str) -> Iterator[str]:
    """The lines of a text that is read in blocks, each with its line break."""
    parts: list[str] = []
    length = 0
    for block in blocks:
        *complete, rest = block.split("\n")
        for line in complete:
            yield "".join((*parts, line, "\n"))
            parts, length = [], 0
        parts.append(rest)
        length += len(rest)
        if length > LONGEST_LINE:
            raise UserError(f"{name} has a line of more than {LONGEST_LINE >> 20} MB; write one record per line")
    if last := "".join(parts):
        yield last


def json_records(lines: Iterator[str], field: str, name: str, spread: bool = False) -> Iterator[Record]:
    """The records of JSON Lines or of one JSON list; with `spread`, also a single record over several lines."""
    begun = False
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        if not begun and (line.lstrip().startswith("[") or (spread and not _is_json(line))):
            records = _parse_json(_read_all(line, lines, name), name)
            for index, record in enumerate(records if isinstance(records, list) else [records]):
                yield Record(text_of(record, field, f"entry {index} of {name}"), f"entry {index} of {name}")
            return
        begun, where = True, f"line {number} of {name}"
        yield Record(text_of(_parse_json(line, where), field, where), where)


def _read_all(first: str, lines: Iterator[str], name: str) -> str:
    parts, size = [], 0
    for line in chain([first], lines):
        parts.append(line)
        size += len(line)
        if size > LONGEST_LINE:
            raise UserError(
                f"{name} is one JSON value of more than {LONGEST_LINE >> 20} MB, which is more than is read at once; "
                "write one record per line, as .jsonl"
            )
    return "".join(parts)


def _is_json(line: str) -> bool:
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return False
    return True


def _parse_json(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where} is not JSON: {error}") from None


def text_of(record: Any, field: str, where: str) -> str:
    """The text of a record: the values of the comma-separated fields, joined by spaces."""
    if not isinstance(record, dict):
        raise UserError(f"{where} is not a record with fields: {str(record)[:40]!r}")
    texts = []
    for key in field.split(","):
        if key not in record:
            raise UserError(f"{where} has no field {key!r}; it has {', '.join(record)}: give data.field=...")
        if not isinstance(record[key], str):
            raise UserError(
                f"field {key!r} in {where} is {type(record[key]).__name__}, not a string: give data.field=..."
            )
        texts.append(record[key])
    return " ".join(texts)


def table_rows(lines: Iterator[str], delimiter: str, quoted: bool, field: str, name: str) -> Iterator[Record]:
    """The rows of a table. The first row is the header, unless `field` selects columns by number."""
    keys = field.split(",")
    rows = _rows(lines, delimiter, quoted, name)
    if all(re.fullmatch("[1-9][0-9]*", key) for key in keys):
        columns = [int(key) - 1 for key in keys]
    else:
        _, header = next(rows, (1, []))
        missing = [key for key in keys if key not in header]
        if missing:
            raise UserError(
                f"{name} has no column {missing[0]!r}; its first row is {', '.join(header)[:80]!r}: "
                "give data.field=..., or column numbers from 1 if there is no header"
            )
        columns = [header.index(key) for key in keys]
    for number, row in rows:
        if len(row) <= max(columns):
            raise UserError(f"line {number} of {name} has {len(row)} columns, and column {max(columns) + 1} is wanted")
        yield Record(" ".join(row[column] for column in columns), f"line {number} of {name}")


def strictly_quoted(lines: Iterator[str], delimiter: str) -> bool:
    """Whether a table uses quoting: parsed with it, every row is complete and all have the same number of columns.

    Most .tsv files use none, and a quote in them is an ordinary character.
    """
    try:
        return len({len(row) for _, row in _rows(lines, delimiter, True, "")}) <= 1
    except UserError:
        return False


def _rows(lines: Iterator[str], delimiter: str, quoted: bool, name: str) -> Iterator[tuple[int, list[str]]]:
    """The non-empty rows, each with the number of its first line."""
    csv.field_size_limit(LONGEST_LINE)
    reader = csv.reader(
        lines, delimiter=delimiter, strict=True, quoting=csv.QUOTE_MINIMAL if quoted else csv.QUOTE_NONE
    )
    while True:
        number = reader.line_num + 1
        try:
            row = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            reason = "a quote is opened and never closed" if "unexpected end" in str(error) else str(error)
            raise UserError(f"line {number} of {name} is not CSV: {reason}") from None
        if row:
            yield number, row


def parquet_rows(raw: IO[bytes], field: str, name: str, seen: Callable[[int], None]) -> Iterator[Record]:
    """The rows of a parquet file; `seen` receives the number of bytes read so far."""
    file = arrow_parquet().ParquetFile(raw)
    names = file.schema_arrow.names
    keys = field.split(",")
    for key in keys:
        if key not in names:
            raise UserError(f"{name} has no field {key!r}; it has {', '.join(names)}: give data.field=...")
        if names.count(key) > 1:
            raise UserError(f"{name} has {names.count(key)} fields {key!r}, and one is wanted: give data.field=...")
    number = 0
    for batch in file.iter_batches(batch_size=1024, columns=keys):
        columns = [batch.column(key).to_pylist() for key in keys]
        for values in zip(*columns, strict=True):
            number += 1
            where = f"row {number} of {name}"
            yield Record(text_of(dict(zip(keys, values, strict=True)), field, where), where)
        seen(raw.tell())


def arrow_parquet() -> Any:
    arrow()
    import pyarrow.parquet

    return pyarrow.parquet


def arrow() -> Any:
    try:
        import pyarrow
    except ImportError:
        raise UserError("reading .parquet and .zst needs pyarrow; try pip install 'adlm[data]'") from None
    return pyarrow
