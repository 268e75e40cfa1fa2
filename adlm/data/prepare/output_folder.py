"""Where a prepared folder goes: what may be replaced there, and the one move that does it. Knows no text and no ids.

Only what `prepare` wrote is ever replaced or deleted.
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
    """The place as it is meant: absolute, links followed. It must be one that a folder can be moved to."""
    try:
        place = out.expanduser().resolve()
        if place.is_mount():
            raise UserError(
                f"{out} is a mount point, and no folder can be moved there; give a folder in it: {out}/data"
            )
        if not is_prepared(place):
            refuse_taken(place)
    except (OSError, RuntimeError, ValueError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{out} cannot be written: {getattr(error, 'strerror', None) or error}") from None
    return place


def work_folder(out: Path) -> Path:
    """Where the folder is made before it is moved to its place."""
    return out.with_name(f"{out.name}.preparing")


def check_work_folder(work: Path) -> None:
    """A working folder must be one that a run of ours left behind."""
    try:
        names = {path.name for path in work.iterdir()}
    except FileNotFoundError:
        return
    except OSError as error:
        raise UserError(f"{work} cannot be used to work in: {error.strerror or error}; move it away") from None
    ours = {*NOTES, *SPLITS, *TOKENIZER, MANIFEST}
    others = sorted(name for name in names - ours if not name.startswith("."))
    if others or (names and not names & {*NOTES, MANIFEST}):
        raise UserError(
            f"{work} is not what a run of `adlm prepare` left behind (it holds {(others or sorted(names))[0]}), and "
            "the work would go there; move it away, or give another --out"
        )


def check_replaceable(out: Path, manifest: dict[str, Any], source: str) -> None:
    """What is built anew takes the place of its own kind: the same source, and nothing beside it."""
    if manifest["source"] != source:
        raise UserError(
            f"{out} was prepared from {manifest['source']}, and this is {source}; give another --out, or delete it"
        )
    listed = {out / name for name in (MANIFEST, *TOKENIZER, *NOTES, *manifest["splits"])}
    listed |= {out / split / file["name"] for split, entry in manifest["splits"].items() for file in entry["files"]}
    others = sorted(path for path in out.rglob("*") if path not in listed and not path.name.endswith(PART))
    if others:
        raise UserError(
            f"{out} would be prepared anew, and it holds {others[0].relative_to(out)}, which `adlm prepare` did not "
            "write; move that away, or give another --out"
        )


def publish(work: Path, out: Path) -> None:
    """The working folder, whole, becomes the prepared one in one move; an older one is deleted."""
    move_folder(work, out)
    if work.exists():  # what was there: an older folder, or an empty one
        remove_folder(work)
    remove_leftovers(out, work)


def remove_leftovers(out: Path, work: Path) -> None:
    """Delete what is no longer needed once `out` is there, and what a process that was killed did not delete."""
    for name in NOTES:
        with suppress(OSError):  # a folder that can only be read is used all the same
            (out / name).unlink(missing_ok=True)
    remove_parts(out)
    remove_parts(out.parent, out.name)
    remove_parts(work.parent, work.name)
    if is_prepared(work) and not any((work / name).exists() for name in NOTES):  # what `out` took the place of
        remove_folder(work)
