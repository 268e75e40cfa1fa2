"""Datasets of the Hugging Face hub as documents, read as they come. Knows no corpora by name and no ids."""

from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from adlm.data.sources.chunks import Chunk, split_into_chunks
from adlm.data.sources.decoding import check_text
from adlm.data.sources.records import text_of
from adlm.data.sources.text_files import ignore, same
from adlm.errors import UserError
from adlm.hub import skip_unreachable_hub


@dataclass(frozen=True)
class HubSplit:
    """One split of a dataset of the hub (or of a local folder laid out like one)."""

    repository: str
    subset: str | None
    hub_split: str
    """Its name there: train, validation, test."""
    split: str = ""
    revision: str | None = None
    field: str = "text"
    damaged: str = "refuse"
    transform: Callable[[str], str] = same
    text: Callable[[Any], str] | None = None
    """A record's text, where that is more than fields joined."""
    remedy: str = "check the name, or give local files with data.path"
    """What to say where the hub is out of reach."""

    size = None

    @property
    def name(self) -> str:
        subset = f":{self.subset}" if self.subset else ""
        return f"{self.repository}{subset} {self.hub_split}".strip()

    def fingerprint(self) -> str:
        """What the hub says it is: the revision of its files."""
        builder = self._asked(lambda datasets: datasets.load_dataset_builder(*self._place, revision=self.revision))
        return f"{builder.name} {builder.hash}"

    def pieces(self, seen: Callable[[int], None] = ignore) -> Generator[Chunk, None, None]:
        for number, record in enumerate(self._records(), 1):
            where = f"record {number} of {self.name}"
            text = self.text(record) if self.text else text_of(record, self.field, where)
            yield from split_into_chunks(self.transform(check_text(text, self.damaged, where)))

    def split_names(self) -> list[str]:
        """What splits the dataset has."""
        names = self._asked(lambda datasets: datasets.get_dataset_split_names(*self._place, revision=self.revision))
        return [str(name) for name in names]

    def num_documents(self) -> int:
        builder = self._asked(lambda datasets: datasets.load_dataset_builder(*self._place, revision=self.revision))
        known = (builder.info.splits or {}).get(self.hub_split)
        return known.num_examples if known else sum(piece.ends for piece in self.pieces())

    def _records(self) -> Iterator[Any]:
        records = self._asked(
            lambda datasets: iter(
                datasets.load_dataset(*self._place, split=self.hub_split, revision=self.revision, streaming=True)
            )
        )
        end = object()
        while True:
            with self._told():
                record = next(records, end)
            if record is end:
                return
            yield record

    @property
    def _place(self) -> tuple[str, str | None]:
        return self.repository, self.subset

    def _asked(self, what: Callable[[Any], Any]) -> Any:
        if not Path(self.repository).exists():
            skip_unreachable_hub()
        try:
            import datasets
        except ImportError:
            raise UserError("reading from the hub needs datasets; try pip install 'adlm[data]'") from None
        datasets.disable_progress_bars()
        with self._told():
            return what(datasets)

    @contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # noqa: BLE001  (whatever the network or the hub does, the remedy is the same)
            reason = str(error).partition("\n")[0][:120]
            raise UserError(
                f"{self.name} was not fetched from the hub ({type(error).__name__}: {reason}); {self.remedy}"
            ) from None
