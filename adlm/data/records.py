"""The texts in files of records: JSON, tables, parquet. Knows no files by name and no compression."""

import csv
import json
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import IO, Any

from adlm.errors import UserError

LONGEST_LINE = 2**29  # of a file of records, which is held whole


def lines_of(blocks: Iterable[str], name: str) -> Iterator[str]:
    """The lines of a text, each with its line break."""
    parts: list[str] = []
    held = 0
    for block in blocks:
        *complete, rest = block.split("\n")
        for line in complete:
            yield "".join((*parts, line, "\n"))
            parts, held = [], 0
        parts.append(rest)
        held += len(rest)
        if held > LONGEST_LINE:
            raise UserError(f"{name} has a line of more than {LONGEST_LINE >> 20} MB: are these records one a line?")
    if last := "".join(parts):
        yield last


def json_records(lines: Iterator[str], field: str, name: str) -> Iterator[str]:
    """One record a line, or one list of records."""
    number = 0
    for line in lines:
        number += 1
        if not line.strip():
            continue
        if number == 1 and line.lstrip().startswith("["):
            records = _parsed(line + "".join(lines), f"{name}")
            for index, record in enumerate(records):
                yield text_of(record, field, f"entry {index} of {name}")
            return
        yield text_of(_parsed(line, f"line {number} of {name}"), field, f"line {number} of {name}")


def _parsed(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where} is not JSON: {error}") from None


def text_of(record: Any, field: str, where: str) -> str:
    if not isinstance(record, dict):
        raise UserError(f"{where} is no record with fields but {str(record)[:40]!r}")
    texts = []
    for key in field.split(","):
        if key not in record:
            raise UserError(f"{where} has no field {key!r}; it has {', '.join(record)}: give data.field=...")
        if not isinstance(record[key], str):
            raise UserError(
                f"field {key!r} in {where} is {type(record[key]).__name__}, and text is wanted: give data.field=..."
            )
        texts.append(record[key])
    return " ".join(texts)


def table_rows(lines: Iterator[str], delimiter: str, field: str, name: str) -> Iterator[str]:
    """The rows of a table; the first names the columns, unless they are asked for by number."""
    csv.field_size_limit(min(sys.maxsize, 2**31 - 1))
    rows = csv.reader(lines, delimiter=delimiter)
    keys = field.split(",")
    try:
        if all(key.isdigit() for key in keys):
            columns = [int(key) - 1 for key in keys]
        else:
            header = next(rows, [])
            missing = [key for key in keys if key not in header]
            if missing:
                raise UserError(
                    f"{name} has no column {missing[0]!r}; its first row is {', '.join(header)[:80]!r}: "
                    "give data.field=..., or a number where columns have no name"
                )
            columns = [header.index(key) for key in keys]
        for row in rows:
            if not row:
                continue
            if len(row) <= max(columns):
                raise UserError(
                    f"line {rows.line_num} of {name} has {len(row)} columns, and column {max(columns) + 1} is wanted"
                )
            yield " ".join(row[column] for column in columns)
    except csv.Error as error:
        raise UserError(f"line {rows.line_num} of {name} is not CSV: {error}") from None


def parquet_rows(raw: IO[bytes], field: str, name: str, seen: Callable[[int], None]) -> Iterator[str]:
    file = arrow_parquet().ParquetFile(raw)
    keys = field.split(",")
    for key in keys:
        if key not in file.schema_arrow.names:
            raise UserError(
                f"{name} has no field {key!r}; it has {', '.join(file.schema_arrow.names)}: give data.field=..."
            )
    for batch in file.iter_batches(batch_size=1024, columns=keys):
        columns = [batch.column(key).to_pylist() for key in keys]
        for values in zip(*columns, strict=True):
            yield text_of(dict(zip(keys, values, strict=True)), field, name)
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
