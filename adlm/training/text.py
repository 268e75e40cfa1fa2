"""Opens the text of a run for `TextTask`: prepared folders, mixed by weight, or a stream."""

import functools
import hashlib
import json
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from adlm.bases.description import folder_template
from adlm.chat.template import PLAIN_TEMPLATE
from adlm.checkpoints.adapter import base_of_run, check_files_of
from adlm.config.load import init_template
from adlm.config.schema import Config, Vocabulary
from adlm.data.prepare.prepare import PrepareProgress, check_source, prepare, template_sha256
from adlm.data.prepare.prepared import Prepared, is_prepared, open_prepared, read_manifest, weighted_folders
from adlm.data.rows.holes import Rearrangement
from adlm.data.rows.loader import START, Loader, Mixture, ReadRows, Stream, join_rows
from adlm.data.rows.packing import PAIRS, Rows, text_width
from adlm.data.sources.corpora import CORPORA
from adlm.data.sources.source import resolve_source, source_recipe
from adlm.distributed import Processes
from adlm.errors import UserError
from adlm.files import remove_folder
from adlm.limits import check_training
from adlm.methods import method_of
from adlm.methods.adlm import Anchored
from adlm.tokens import load_tokenizer
from adlm.training.run_folder import RunFolder
from adlm.training.step import seed_of
from adlm.training.task import DataSize, Report, TextTask

LARGE = 10**9  # bytes of shards: verifying more than this is reported
PREPARED_TOKENIZER = "tokenizer.json"  # the option `tokenizer` of a run whose prepared folder has its own tokenizer

ANY_VOCABULARY = Vocabulary(size=2**31 - 1, mask_id=0, bos_id=1, eos_id=2)  # while the tokenizer is not known


def open_text_task(config: Config, run: RunFolder, processes: Processes, report: Report) -> TextTask:
    """The text that the config names. Without `data.prepared`, a new run first prepares it in RUN/data."""
    if config.train.lora_rank and not config.init:
        raise UserError(
            f"train.lora_rank {config.train.lora_rank} needs a model to start from; add init=MODEL, or "
            "train.lora_rank=0 to train all weights"
        )
    # wrong options and a damaged base are refused before text is prepared
    method_of(replace(config, vocabulary=config.vocabulary or ANY_VOCABULARY))
    # a run that has started needs only the base of LoRA
    base = base_of_run(config.init) if config.train.lora_rank else None
    if config.init and base is None and run.config is None:
        check_files_of(config.init)
    template = _chat_template(config, run)
    if config.data.streaming:
        task = _open_stream(config, processes)
    else:
        task = _open_rows(config, template or PLAIN_TEMPLATE, run, processes, report)
    if task.config.data.format == "pairs":
        template = template or PLAIN_TEMPLATE
        if config.train.infill:
            raise UserError(f"train.infill {config.train.infill} rearranges running text; data.format pairs needs 0")
        if config.train.random_length:
            raise UserError(
                f"train.random_length {config.train.random_length} cuts running text, and answers end where they end; "
                "data.format pairs needs 0"
            )
    task = replace(task, chat_template=template)
    if base is not None:
        resolved = replace(task.config, train=replace(config.train, base_sha256=base.sha256))
        task = replace(task, base=base, config=resolved)
    method_of(task.config)  # raises for an invalid config before it is saved as the run's config
    check_training(task.config, processes.device, processes.num_ranks)
    return task


def _chat_template(config: Config, run: RunFolder) -> str | None:
    """That of the model `init`, which a run that has started need not have any more."""
    if not config.init or run.config is None:
        return init_template(config.init) if config.init else None
    template = folder_template(run.path / "model")
    with suppress(UserError):
        template = template or init_template(config.init)
    return template


def _open_rows(config: Config, template: str, run: RunFolder, processes: Processes, report: Report) -> TextTask:
    """`template` is the chat template by which pairs are written."""
    saved = processes.broadcast(run.config)
    opened = processes.main_process_first(
        lambda: _open_or_prepare(config, template, run.path, saved, processes.is_main_process, report)
    )
    texts, shares = [text for text, _ in opened], _shares(weight for _, weight in opened)
    prepared, train = texts[0], config.train
    for text in texts:
        _check_prepared(text, config)
        _check_mixed(text, prepared, config)
    packing = PAIRS if prepared.has_answers else config.data.packing or prepared.manifest["packing"]
    data = replace(config.data, packing=packing, format="pairs" if prepared.has_answers else "text")
    data = replace(data, labels=prepared.labels)
    resolved = replace(config, vocabulary=prepared.tokenizer.vocabulary, data=data)
    if config.data.prepared:  # record the source of the text in the config, not only the folder of its shards
        source, form = prepared.manifest["source"], prepared.manifest["recipe"]["form"]
        kind = "name" if source in CORPORA else "hub" if len(form) == 2 else "path"  # the recipe of files has 3 entries
        options = {kind: source, "prepared": str(prepared.folder.resolve())}  # absolute, to resume from any folder
        if len(texts) > 1:
            options = {"prepared": ",".join(f"{text.folder.resolve()}={weight:g}" for text, weight in opened)}
        resolved = replace(resolved, tokenizer=PREPARED_TOKENIZER, data=replace(resolved.data, **options))
    if train.random_length and packing.startswith("padded"):
        raise UserError(
            f"train.random_length {train.random_length} cuts packed rows, and those of data.packing {packing} "
            "have the lengths of their documents, which eos ends; use data.packing=packed, or train.random_length=0"
        )
    rearrangement = None
    if train.infill:
        hole_id, eos_id = config.model.hole_id, prepared.tokenizer.vocabulary.eos_id
        assert hole_id is not None  # BlockCausal checks both
        assert eos_id is not None
        rearrangement = Rearrangement(train.infill, hole_id, eos_id)
    method = method_of(resolved)
    reads_labels = isinstance(method, Anchored) and method.reads_labels
    if reads_labels and prepared.labels == "none":
        raise UserError(
            f"anchor.rule {config.anchor.rule} needs labels, and {prepared.folder} has none; prepare the text with "
            "data.labels=python, or use another rule"
        )
    if reads_labels and train.infill:
        raise UserError(
            f"train.infill {train.infill} rearranges rows, and labels are those of rows as they are; anchor.rule "
            f"{config.anchor.rule} needs train.infill=0"
        )
    all_rows = [text.rows("train", config.length, packing, overlap=True) for text in texts]
    loaders = [
        Loader(
            rows,
            train.batch_size,
            seed_of(train.seed, "order", number),
            processes.rank,
            processes.num_ranks,
            rearrangement=rearrangement,
            random_length=train.random_length,
            reads_labels=reads_labels,
        )
        for number, rows in enumerate(all_rows)
    ]
    for text, rows, share in zip(texts, all_rows, shares, strict=True):
        num_tokens = len(text.tokens("train"))
        if packing == "packed" and num_tokens < text_width(text.tokenizer.vocabulary, config.length):
            of_folder = f" of {text.folder}" if len(texts) > 1 else ""
            if not config.data.prepared and saved is None and processes.is_main_process:
                remove_folder(text.folder)  # no run has used it, and it would be in the way of another text
            raise UserError(
                f"the training text{of_folder} has {num_tokens:,} tokens, less than one row of length "
                f"{config.length}; give more text, or a smaller length"
            )
        for note in rows.notes():
            report(note)
        if len(texts) > 1:
            epochs = share * train.steps * train.batch_size / len(rows)
            report(f"{text.folder}: {share:.1%} of the rows of every batch, {epochs:.2g} epochs in all")
    described = [text.manifest["splits"]["train"] for text in texts]  # with the checksums of the training shards
    held_out = _held_out(texts, shares, config, packing)
    return TextTask(
        resolved,
        prepared.tokenizer,
        loaders[0] if len(texts) == 1 else Mixture(tuple(loaders), tuple(shares), loaders[0].seed),
        _checksum(described[0] if len(texts) == 1 else [described, shares]),
        DataSize(
            sum(map(len, all_rows)),
            sum(len(text.tokens("train")) for text in texts),
            sum(len(numbers) for _, numbers in held_out),
            sum(len(rows) for rows, _ in held_out),
        ),
        functools.partial(_read_held_out, held_out),
    )


def _check_prepared(prepared: Prepared, config: Config) -> None:
    """UserError if the folder does not hold what the config asks for."""
    if config.data.format == "pairs" and not prepared.has_answers:
        raise UserError(
            f"data.prepared {prepared.folder} holds running text, and data.format is pairs; prepare pairs with "
            "`adlm prepare data.format=pairs ...`, or leave data.format out"
        )
    if config.data.labels not in ("none", prepared.labels):
        raise UserError(
            f"data.prepared {prepared.folder} has labels {prepared.labels}, and data.labels is "
            f"{config.data.labels}; prepare it with `adlm prepare data.labels={config.data.labels} ...`"
        )


def _check_mixed(prepared: Prepared, first: Prepared, config: Config) -> None:
    """UserError if two folders cannot be mixed."""
    kinds = {
        "tokenizer": (prepared.tokenizer.sha256, first.tokenizer.sha256),
        "data.format": (prepared.has_answers, first.has_answers),
        "data.labels": (prepared.labels, first.labels),
    }
    if not config.data.packing:
        kinds["data.packing"] = (prepared.manifest["packing"], first.manifest["packing"])
    for option, (own, others) in kinds.items():
        if own != others:
            raise UserError(
                f"data.prepared mixes {first.folder} and {prepared.folder}, which differ in {option}; prepare both "
                f"with the same {option}"
            )


HeldOut = list[tuple[Rows, list[int]]]
"""The held-out rows of each text, and the numbers of those used for validation."""


def _shares(weights: Iterable[float]) -> list[float]:
    """The weights over their sum."""
    listed = list(weights)
    return [weight / sum(listed) for weight in listed]


def _held_out(texts: Sequence[Prepared], shares: Sequence[float], config: Config, packing: str) -> HeldOut:
    """Evenly spaced rows of each text that holds some out, in these shares, `train.valid_rows` at most."""
    rows, weights = [], []
    for text, share in zip(texts, shares, strict=True):
        if (split := next((split for split in ("valid", "test") if split in text.splits), None)) is not None:
            rows.append(text.rows(split, config.length, packing))
            weights.append(share)
    most = min(config.train.valid_rows, sum(map(len, rows)))
    nums = [min(len(each), round(share * most)) for each, share in zip(rows, _shares(weights), strict=True)]
    return [(each, [index * len(each) // num for index in range(num)]) for each, num in zip(rows, nums, strict=True)]


def _read_held_out(held_out: HeldOut, start: int, stop: int) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """x, pad and given tokens of the rows [start, stop) of all those used for validation."""
    first, parts = 0, []
    for rows, numbers in held_out:
        some = np.arange(max(start, first), min(stop, first + len(numbers)))
        if len(some):
            chosen = [numbers[index - first] for index in some]
            here = np.isin(np.arange(start, stop), some)
            parts.append((here, ReadRows(*rows.read(chosen), rows.given(chosen), None)))
        first += len(numbers)
    batch = join_rows(parts).batch(START)
    return batch.x, batch.pad, batch.given


def _checksum(described: Any) -> str:
    return hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()


def _open_or_prepare(
    config: Config, template: str, run: Path, saved: Config | None, verify: bool, report: Report
) -> list[tuple[Prepared, float]]:
    """The prepared texts and their weights; `verify` compares their checksums.

    A run that has started never prepares its data again.
    """
    source = config.data.name or config.data.path or config.data.hub
    run_data = run / "data"
    if not config.data.prepared and saved is None:
        if source:  # else `prepare` raises
            report(f"preparing {source} for tokenizer {config.tokenizer}")
        outcome = prepare(config, run_data, _every_ten_seconds(report), chat_template=template)
        for line in (f"data {outcome.how}: {run_data}", *outcome.notes):
            report(line)
        return [(outcome.prepared, 1.0)]
    if not config.data.prepared and saved is not None:
        if not is_prepared(run_data):
            raise UserError(
                f"{run} has started, but there is no prepared data in {run_data}; restore it, or give a folder with "
                "the same data: data.prepared=FOLDER"
            )
        if verify:
            _report_size(run_data, report)
            check_source(config, run_data, saved)
        return [(open_prepared(run_data, sums=verify), 1.0)]
    folders = weighted_folders(config.data.prepared)
    return [(_open_folder(folder, config, template, verify, report), weight) for folder, weight in folders.items()]


def _open_folder(folder: Path, config: Config, template: str, verify: bool, report: Report) -> Prepared:
    """A folder of `data.prepared`."""
    source = config.data.name or config.data.path or config.data.hub
    if verify:
        _report_size(folder, report)
    prepared = open_prepared(folder, sums=verify)
    if source and prepared.manifest["source"] != source:
        raise UserError(
            f"data.prepared {folder} was made from {prepared.manifest['source']}, but the config names "
            f"{source}; give the folder prepared from that text, or run adlm prepare"
        )
    if prepared.has_answers and prepared.manifest["recipe"]["chat_template"] != template_sha256(template):
        of_init = f"init={config.init} " if config.init else ""
        raise UserError(
            f"data.prepared {folder} was written by another chat template than the model's; prepare it "
            f"with `adlm prepare {of_init}data.format=pairs ...`"
        )
    return prepared


def _report_size(folder: Path, report: Report) -> None:
    """Report that large shards are verified, which takes a while."""
    size = sum(file["bytes"] for entry in read_manifest(folder)["splits"].values() for file in entry["files"])
    if size > LARGE:
        report(f"comparing the checksums of {size / 1e9:.1f} GB of shards in {folder}")


def _every_ten_seconds(report: Report) -> Callable[[PrepareProgress], None]:
    """A callback that reports the progress of the preparation at most every ten seconds."""
    reported_at = time.monotonic()

    def report_progress(progress: PrepareProgress) -> None:
        nonlocal reported_at
        if time.monotonic() - reported_at < 10:
            return
        reported_at = time.monotonic()
        share = f"{progress.bytes_read / progress.bytes_in_all:.0%} read, " if progress.bytes_in_all else ""
        report(f"preparing: {share}{progress.tokens:,} tokens")

    return report_progress


def _open_stream(config: Config, processes: Processes) -> TextTask:
    """Batches directly from the source; the held-out rows are read into memory."""
    if config.data.prepared:
        raise UserError(
            f"data.streaming true reads text as it is, and data.prepared {config.data.prepared} is prepared; leave one "
            "out"
        )
    if config.train.infill:
        raise UserError(
            f"train.infill {config.train.infill} rearranges prepared rows; use data.streaming=false, or train.infill=0"
        )
    if config.train.random_length:
        raise UserError(
            f"train.random_length {config.train.random_length} cuts prepared rows; use data.streaming=false, or "
            "train.random_length=0"
        )
    method = method_of(replace(config, vocabulary=config.vocabulary or ANY_VOCABULARY))
    if isinstance(method, Anchored) and method.reads_labels:
        raise UserError(f"anchor.rule {config.anchor.rule} needs the labels of prepared text; use data.streaming=false")
    tokenizer, source, train = load_tokenizer(config.tokenizer), resolve_source(config.data), config.train
    resolved = replace(config, vocabulary=tokenizer.vocabulary, data=replace(config.data, packing=source.packing))
    stream = Stream(
        source, tokenizer, config.length, train.batch_size, rank=processes.rank, num_ranks=processes.num_ranks
    )
    try:
        held_out = list(islice(Stream(source, tokenizer, config.length, 1, "valid").batches(), train.valid_rows))
    except UserError:  # nothing is held out
        held_out = []

    def read_held_out(start: int, stop: int) -> tuple[Tensor, Tensor | None, None]:
        rows = held_out[start:stop]
        pads = [row.pad for row in rows if row.pad is not None]
        return torch.cat([row.x for row in rows]), torch.cat(pads) if pads else None, None

    fingerprint = _checksum(source_recipe(source))
    size = DataSize(None, None, len(held_out), len(held_out))
    return TextTask(resolved, tokenizer, stream, fingerprint, size, read_held_out)
