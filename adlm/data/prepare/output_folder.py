"""The output folder of `prepare`: checks on what may be replaced, and the atomic move that replaces it.

Only files that `prepare` wrote are ever replaced or deleted. Independent of text and token ids.
"""

from contextlib import suppress
from pathlib import Path
from typing import Any

from adlm.data.prepare.journal import JOURNAL, LOCK, RECIPE
from adlm.data.prepare.prepared import MANIFEST, is_prepared
from adlm.data.prepare.shards import SPLITS
from adlm.errors import UserError
from adlm.files import PART, move_folder, refuse_taken, remove_folder, remove_parts

TOKENIZER = ("tokenizer.json", "special_tokens_map.json")
NOTES = (RECIPE, JOURNAL, LOCK)


def resolve_output(out: Path) -> Path:
    """The absolute path of `out` with links resolved, checked to be one that a folder can be moved to."""
    try:
        path = out.expanduser().resolve()
        if path.is_mount():
            raise UserError(
                f"{out} is a mount point, and no folder can be moved there; give a folder in it: {out}/data"
            )
        if not is_prepared(path):
            refuse_taken(path)
    except (OSError, RuntimeError, ValueError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{out} cannot be written: {getattr(error, 'strerror', None) or error}") from None
    return path


def work_folder(out: Path) -> Path:
    """The working folder, in which the output is written before it is moved to `out`."""
    return out.with_name(f"{out.name}.preparing")


def check_work_folder(work: Path) -> None:
    """Refuse a working folder that exists and was not left behind by a run of `prepare`."""
    try:
        names = {path.name for path in work.iterdir()}
    except FileNotFoundError:
        return
    except OSError as error:
        raise UserError(f"{work} cannot be used to work in: {error.strerror or error}; move it away") from None
    expected = {*NOTES, *SPLITS, *TOKENIZER, MANIFEST}
    unexpected = sorted(name for name in names - expected if not name.startswith("."))
    if unexpected or (names and not names & {*NOTES, MANIFEST}):
        raise UserError(
            f"{work} is not what a run of `adlm prepare` left behind (it holds {(unexpected or sorted(names))[0]}), "
            "but is needed as the working folder; move it away, or give another --out"
        )


def check_replaceable(out: Path, manifest: dict[str, Any], source: str) -> None:
    """Refuse to replace a prepared folder of another source, or one that contains files `prepare` did not write."""
    if manifest["source"] != source:
        raise UserError(
            f"{out} was prepared from {manifest['source']}, and this is {source}; give another --out, or delete it"
        )
    listed = {out / name for name in (MANIFEST, *TOKENIZER, *NOTES, *manifest["splits"])}
    listed |= {out / split / file["name"] for split, entry in manifest["splits"].items() for file in entry["files"]}
    unlisted = sorted(path for path in out.rglob("*") if path not in listed and not path.name.endswith(PART))
    if unlisted:
        raise UserError(
            f"{out} would be prepared anew, and it holds {unlisted[0].relative_to(out)}, which `adlm prepare` did not "
            "write; move that away, or give another --out"
        )


def publish(work: Path, out: Path) -> None:
    """Move the completed working folder to `out` atomically, and delete the folder it replaces."""
    move_folder(work, out)
    if work.exists():  # the replaced folder, which the move exchanged with the new one
        remove_folder(work)
    remove_leftovers(out, work)


def remove_leftovers(out: Path, work: Path) -> None:
    """Delete files that are not needed once `out` exists, including those left by a killed process."""
    for name in NOTES:
        with suppress(OSError):  # a read-only folder is used as it is
            (out / name).unlink(missing_ok=True)
    remove_parts(out)
    remove_parts(out.parent, out.name)
    remove_parts(work.parent, work.name)
    if is_prepared(work) and not any((work / name).exists() for name in NOTES):  # the folder that `out` replaced
        remove_folder(work)
