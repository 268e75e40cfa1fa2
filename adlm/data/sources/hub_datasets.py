"""Documents streamed from datasets on the Hugging Face Hub. Independent of named corpora and tokenizers."""

from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from adlm.data.sources.chunks import Chunk, split_into_chunks
from adlm.data.sources.decoding import check_text, text_of
from adlm.data.sources.text_files import identity, ignore_progress
from adlm.errors import UserError
from adlm.hub import skip_unreachable_hub


@dataclass(frozen=True)
class HubSplit:
    """One split of a dataset on the Hub, or of a local folder in the same layout."""

    repository: str
    subset: str | None
    hub_split: str
    """Its name on the Hub: train, validation, test."""
    split: str = ""
    revision: str | None = None
    field: str = "text"
    damaged: str = "refuse"
    transform: Callable[[str], str] = identity
    text: Callable[[Any], str] | None = None
    """Converts a record to its text; None joins the fields named by `field`."""
    remedy: str = "check the name, or give local files with data.path"
    """Remedy in the error message if the Hub cannot be reached."""

    size = None

    @property
    def name(self) -> str:
        subset = f":{self.subset}" if self.subset else ""
        return f"{self.repository}{subset} {self.hub_split}".strip()

    def fingerprint(self) -> str:
        """Builder name and hash, which identify the revision of the files on the Hub."""
        builder = self._builder()
        return f"{builder.name} {builder.hash}"

    def chunks(self, seen: Callable[[int], None] = ignore_progress) -> Generator[Chunk, None, None]:
        for number, record in enumerate(self._records(), 1):
            where = f"record {number} of {self.name}"
            text = self.text(record) if self.text else text_of(record, self.field, where)
            yield from split_into_chunks(self.transform(check_text(text, self.damaged, where)))

    def split_names(self) -> list[str]:
        """The names of the dataset's splits."""
        names = self._call_datasets(
            lambda datasets: datasets.get_dataset_split_names(self.repository, self.subset, revision=self.revision)
        )
        return [str(name) for name in names]

    def num_documents(self) -> int:
        known = (self._builder().info.splits or {}).get(self.hub_split)
        return known.num_examples if known else sum(chunk.ends for chunk in self.chunks())

    def _records(self) -> Iterator[Any]:
        options = {"split": self.hub_split, "revision": self.revision, "streaming": True}
        records = self._call_datasets(
            lambda datasets: iter(datasets.load_dataset(self.repository, self.subset, **options))
        )
        end = object()
        while True:
            with self._hub_errors():
                record = next(records, end)
            if record is end:
                return
            yield record

    def _builder(self) -> Any:
        return self._call_datasets(
            lambda datasets: datasets.load_dataset_builder(self.repository, self.subset, revision=self.revision)
        )

    def _call_datasets(self, function: Callable[[Any], Any]) -> Any:
        """`function(datasets)`, with failures as user errors."""
        if not Path(self.repository).exists():
            skip_unreachable_hub()
        try:
            import datasets
        except ImportError:
            raise UserError("reading from the hub needs datasets; try pip install 'adlm[data]'") from None
        datasets.disable_progress_bars()
        with self._hub_errors():
            return function(datasets)

    @contextmanager
    def _hub_errors(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # noqa: BLE001  (the remedy is the same for every failure of network or Hub)
            reason = str(error).partition("\n")[0][:120]
            raise UserError(
                f"{self.name} was not fetched from the hub ({type(error).__name__}: {reason}); {self.remedy}"
            ) from None
