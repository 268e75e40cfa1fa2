"""Collects Python source from wheels of well-known projects into one JSONL file.

    pip download --no-deps --dest wheels django sympy ...
    python experiments/code/collect.py wheels/*.whl --out code.jsonl --packages experiments/code/packages.md

A line is {"text", "source": "package version path", "license"}; the lines are in the order of the sha256 of their text,
which is a random one that anyone finds again. The table of packages has their versions, licences and what was kept.
"""

import argparse
import ast
import hashlib
import json
import re
import warnings
import zipfile
from dataclasses import dataclass, field
from email.parser import HeaderParser
from pathlib import Path

MAX_BYTES = 200_000
SKIPPED_FOLDERS = {"tests", "test", "testing", "_vendor", "_vendored", "vendor", "vendored", "extern", "externals"}
"""Tests repeat tables and names of what they test; vendored files have a licence of their own."""
GENERATED = re.compile(r"(auto[- ]?|automatically |machine[- ])generated|generated (by|from|with)|do not edit", re.I)
COPYLEFT = re.compile(r"GPL|General Public|MPL|Mozilla", re.I)


@dataclass
class Package:
    name: str
    version: str
    license: str
    texts: dict[str, str] = field(default_factory=dict)
    """The kept text of each path."""
    num_seen: int = 0

    @property
    def num_characters(self) -> int:
        return sum(map(len, self.texts.values()))


def read_wheel(path: Path, known: set[str]) -> Package:
    """The Python files of a wheel that are kept; the sha256 of their texts are added to `known`."""
    with zipfile.ZipFile(path) as wheel:
        metadata = next(name for name in wheel.namelist() if re.fullmatch(r"[^/]+\.dist-info/METADATA", name))
        about = HeaderParser().parsestr(wheel.read(metadata).decode())
        package = Package(about["Name"].lower(), about["Version"], license_of(about))
        for entry in sorted(wheel.infolist(), key=lambda entry: entry.filename):
            folders = entry.filename.split("/")[:-1]
            if not entry.filename.endswith(".py") or SKIPPED_FOLDERS & {folder.lower() for folder in folders}:
                continue
            package.num_seen += 1
            text = kept_text(wheel.read(entry)) if entry.file_size <= MAX_BYTES else None
            if text is not None and (digest := sha256(text)) not in known:
                known.add(digest)
                package.texts[entry.filename] = text
    return package


def license_of(about: object) -> str:
    """The licence as the project writes it: expression, classifiers, or the first line of the free text."""
    expression, named = about["License-Expression"], about.get_all("Classifier", [])
    of_classifiers = [each.split(" :: ")[-1] for each in named if each.startswith("License :: OSI Approved :: ")]
    return expression or ", ".join(of_classifiers) or (about["License"] or "not named").strip().splitlines()[0]


def kept_text(content: bytes) -> str | None:
    """The text of a file with LF; None of what is not UTF-8, does not parse, is empty, generated or a table."""
    try:
        text = content.decode().removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # SyntaxWarning: invalid escape sequences
            ast.parse(text)
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return None
    lines = text.splitlines()
    is_table = max(map(len, lines), default=0) > 1000 or sum(map(str.isdigit, text)) > 0.2 * len(text)
    is_generated = GENERATED.search("\n".join(lines[:20])) is not None
    return None if len(text) < 200 or "\0" in text or is_table or is_generated else text


def sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def table(packages: list[Package]) -> str:
    lines = ["| package | version | licence | files kept of seen | million characters |", "|---|---|---|---|---|"]
    lines += [
        f"| {each.name} | {each.version} | {each.license} | {len(each.texts):,} of {each.num_seen:,} | "
        f"{each.num_characters / 1e6:.2f} |"
        for each in packages
    ]
    num_kept, num_seen = sum(len(each.texts) for each in packages), sum(each.num_seen for each in packages)
    num_characters = sum(each.num_characters for each in packages)
    lines.append(f"| *all* | | | {num_kept:,} of {num_seen:,} | {num_characters / 1e6:.2f} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheels", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, required=True, help="JSONL file of the texts")
    parser.add_argument("--packages", type=Path, required=True, help="Markdown table of the packages")
    arguments = parser.parse_args()
    known, packages, records = set[str](), list[Package](), list[tuple[str, dict[str, str]]]()
    for path in sorted(arguments.wheels, key=lambda path: path.name.lower()):
        package = read_wheel(path, known)
        if COPYLEFT.search(package.license):
            raise SystemExit(f"{path.name} has the licence {package.license}; leave it out")
        packages.append(package)
        for name, text in package.texts.items():
            source = f"{package.name} {package.version} {name}"
            records.append((sha256(text), {"text": text, "source": source, "license": package.license}))
        print(f"{package.name} {package.version}: {len(package.texts):,} files", flush=True)
    records.sort()
    with arguments.out.open("w") as out:
        out.writelines(json.dumps(record) + "\n" for _, record in records)
    arguments.packages.write_text(table(packages))
    print(f"{len(records):,} files, {sum(p.num_characters for p in packages):,} characters")


if __name__ == "__main__":
    main()
