"""The models in the lm-evaluation-harness: importing this module registers the model `adlm` there.

`adlm lm-eval` is the command; in Python, `import adlm.apps.harness`, then
`lm_eval.simple_evaluate("adlm", {"path": "runs/own"}, tasks=["arc_easy"])`. docs/evaluation.md has the definitions.
"""

import logging
import math
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import takewhile
from typing import Any, cast, get_args
from zlib import crc32

from adlm.canvas import HOLE, encode_canvas, make_canvas
from adlm.config.options import suggestion
from adlm.config.schema import Sampling
from adlm.errors import UserError, whole_number
from adlm.language_model import NO_TOKENIZER, load
from adlm.likelihood.conditional import ConditionalNats, ConditionalRow, ConditionalSettings, Score, conditional_nats
from adlm.likelihood.measurement import measure_nats
from adlm.likelihood.settings import AUTO, PerplexitySettings
from adlm.likelihood.standard_errors import summarize
from adlm.likelihood.text_sets import rows_of_texts
from adlm.methods.inputs import end_of_row, vocabulary_of
from adlm.models.transformer import num_parameters
from adlm.sampling.frame import Frame
from adlm.sampling.rng import RowRng
from adlm.sampling.samplers import sampler_of
from adlm.sampling.settings import SampleSettings

try:
    from lm_eval.__main__ import cli_evaluate
    from lm_eval.api.model import LM
    from lm_eval.api.registry import register_model
    from lm_eval.models.utils import normalize_gen_kwargs, postprocess_generated_text
    from lm_eval.utils import simple_parse_args_string
    from tqdm import tqdm
except ModuleNotFoundError:
    raise UserError("the package lm-eval is not installed; try pip install 'adlm[lm-eval]'") from None

REPLICATES = 4  # of `loglikelihood_rolling`: the samples of every row are divided among them
MODEL_ARGUMENTS = [
    "path",
    "device",
    "batch_size",
    "samples",
    "target_stderr",
    "max_samples",
    "seed",
    "score",
    "sampler",
    "steps",
    "length",
]
SAMPLING_OPTIONS = tuple(field.name for field in fields(Sampling))
logger = logging.getLogger("lm_eval.models.adlm")  # under lm_eval's own logger, which has the handler


@dataclass(frozen=True)
class Generation:
    """A request of `generate_until` as a row to fill."""

    ids: tuple[int, ...]
    """bos, context and masks."""
    num_given: int | None
    """Number of ids before the masks; None for a text with holes, which is returned as a whole."""
    until: tuple[str, ...]
    sampling: Sampling
    rng_row: int


@register_model("adlm")
class HarnessModel(LM):  # type: ignore[misc]
    """A model for the harness. Every score depends on its own request alone, not on batches or other requests."""

    def __init__(
        self,
        path: str = "",
        device: str | None = None,
        batch_size: int | str | None = None,
        samples: int = 64,
        target_stderr: float | None = None,
        max_samples: int = 1024,
        seed: int = 0,
        score: str | None = None,
        sampler: str | None = None,
        steps: int | None = None,
        length: int | None = None,
        max_batch_size: int | None = None,
        **unknown: object,
    ):
        super().__init__()
        for name in unknown:
            known = ", ".join(MODEL_ARGUMENTS)
            raise UserError(
                f"model_args: there is no argument {name!r}{suggestion(name, MODEL_ARGUMENTS)} (there are {known})"
            )
        if not path:
            raise UserError("model_args: path is missing; give --model_args path=FOLDER, a run or model folder")
        self.model = load(str(path), device or "auto")
        if self.model.tokenizer is None:
            raise UserError(NO_TOKENIZER)
        self.text_tokenizer = self.model.tokenizer
        self.samples, self.seed = whole_number("samples", samples, 2), whole_number("seed", seed)
        is_number = isinstance(target_stderr, (int, float)) and not isinstance(target_stderr, bool)
        if target_stderr is not None and not (is_number and 0 < target_stderr < math.inf):
            raise UserError(f"target_stderr {str(target_stderr)!r:.60} must be positive, in nats; try 0.5")
        self.target_stderr = target_stderr
        self.max_samples = whole_number("max_samples", max_samples, 2)
        rows = max_batch_size  # with `auto`; None is as many as fit a fixed number of tokens
        if batch_size is not None and not str(batch_size).startswith("auto"):
            if not str(batch_size).isdecimal() or int(batch_size) < 1:
                raise UserError(f"batch_size {str(batch_size)!r:.60} must be auto or a whole number, at least 1")
            rows = int(batch_size)
        is_block_causal = self.model.config.model.block_length > 0
        scores = get_args(Score) if is_block_causal else ("bound",)
        self.score = score or ("left-to-right" if is_block_causal else "bound")
        if self.score not in scores:
            remedy = f"use {' or '.join(scores)}" if is_block_causal else "leave it out: the model is not block-causal"
            raise UserError(f"score {str(score)!r:.60} cannot be used; {remedy}")
        self.is_exact = self.model.method.exact or self.score != "bound"
        self.settings = ConditionalSettings(self.samples, self.seed, rows, cast(Score, self.score))
        options: dict[str, Any] = {"sampler": sampler, "steps": steps}
        self.sampling_options = {name: value for name, value in options.items() if value is not None}
        self.model.sampling(**self.sampling_options)  # checked now, not at the first generation
        self.bos, self.end = vocabulary_of(self.model.config).row_boundaries[0], end_of_row(self.model.method)
        longest = self.model.config.length
        self.length = whole_number("length", longest if length is None else length, len(self.bos) + 2, longest)
        self._device = self.model.device
        self._warned: set[str] = set()
        self.stderrs: list[float] = []
        """Monte Carlo standard errors of all log-likelihoods so far, in the order of the requests."""
        self.num_questions = self.num_undecided = 0
        """Questions so far with several answers, and those whose two most likely ones differ by less than the error."""

    @classmethod
    def create_from_arg_obj(
        cls, arg_dict: dict[str, Any], additional_config: dict[str, Any] | None = None
    ) -> "HarnessModel":
        """With the harness's options --batch_size and --device, over which the arguments of the model take precedence.

        The method of the base class fails if an option is given twice.
        """
        options = {name: value for name, value in (additional_config or {}).items() if value is not None}
        return cls(**options | arg_dict)

    @classmethod
    def create_from_arg_string(cls, arg_string: str, additional_config: dict[str, Any] | None = None) -> "HarnessModel":
        return cls.create_from_arg_obj(simple_parse_args_string(arg_string), additional_config)

    @property
    def room(self) -> int:
        """The largest number of tokens of a text that is written in one row."""
        return self.length - len(self.bos)

    @property
    def tokenizer_name(self) -> str:
        return self.text_tokenizer.name

    def apply_chat_template(self, chat_history: object, add_generation_prompt: bool = True) -> str:
        raise UserError("models of adlm are given texts as they are; leave --apply_chat_template out")

    def get_model_info(self) -> dict[str, Any]:
        """What the harness saves under `config` with its results."""
        model = self.model
        info = {
            "adlm_method": model.config.method,
            "model_num_parameters": num_parameters(model.network),
            "exact": self.is_exact,
            "score": self.score,
            "samples": self.samples,
            "target_stderr": self.target_stderr,
            "max_samples": self.max_samples,
            "seed": self.seed,
            "length": self.length,
        }
        if self.stderrs:
            mean = sum(self.stderrs) / len(self.stderrs)
            info["loglikelihood_stderr"] = {"mean": mean, "max": max(self.stderrs), "requests": len(self.stderrs)}
        if self.num_questions:
            info["undecided_questions"] = {"num": self.num_undecided, "of": self.num_questions}
        return info

    # Log-likelihoods

    def loglikelihood(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """(a lower bound on log p(continuation | context), whether greedy decoding gives it) of every request; exact
        for causal models, and for block-causal ones by `score`.

        With a target error, the first samples decide how many are drawn anew. They are not averaged in: that would
        favour continuations whose first samples happen to agree.
        """
        pieces = [list(self._rows(*self._encode_pair(*request.args))) for request in requests]
        results = self._scores(pieces, self.samples, disable_tqdm)
        wanted = [self._num_samples(result.stderr) for result in results]
        for num in sorted(set(wanted) - {self.samples}):
            chosen = [index for index in range(len(wanted)) if wanted[index] == num]
            again = self._scores([pieces[index] for index in chosen], num, disable_tqdm)
            for index, result in zip(chosen, again, strict=True):
                results[index] = result
        self._log_stderrs([result.stderr for result in results])
        self._warn_of_errors(requests, results)
        return [(-result.nats, result.greedy) for result in results]

    def _scores(
        self, pieces: Sequence[Sequence[ConditionalRow]], samples: int, disable_tqdm: bool
    ) -> list[ConditionalNats]:
        """The scores of continuations, each in one or more rows."""
        rows = [row for each in pieces for row in each]
        settings = replace(self.settings, samples=samples)
        with tqdm(total=len(rows), desc=f"Scoring continuations, samples={samples}", disable=disable_tqdm) as bar:
            scores = iter(conditional_nats(self.model.method, self.model.network, rows, settings, bar.update))
        return [_sum([next(scores) for _ in each]) for each in pieces]

    def _num_samples(self, stderr: float) -> int:
        """The samples that a target error needs, if `samples` of them have this error: 1, 2, 4, ... times as many."""
        num = self.samples
        if self.target_stderr is not None:
            while stderr**2 * self.samples > self.target_stderr**2 * num and 2 * num <= self.max_samples:
                num *= 2
        return num

    def _warn_of_errors(self, requests: Sequence[Any], results: Sequence[ConditionalNats]) -> None:
        """Warns of errors above the target, and of questions that errors leave open."""
        above = sum(result.stderr > self.target_stderr for result in results) if self.target_stderr is not None else 0
        if above:
            logger.warning(
                f"{above} of {len(results)} log-likelihoods have a standard error above target_stderr="
                f"{self.target_stderr:g}; raise max_samples={self.max_samples}"
            )
        questions: dict[tuple[Any, ...], dict[Any, ConditionalNats]] = {}
        for request, result in zip(requests, results, strict=True):
            if request.doc_id is not None:  # answers without context are for mutual information
                key = (request.task_name, request.doc_id, bool(request.args[0]))
                questions.setdefault(key, {})[request.args] = result
        num = num_undecided = 0
        for answers in questions.values():
            best, *others = sorted(answers.values(), key=lambda answer: answer.nats)
            num += bool(others)
            num_undecided += bool(others) and others[0].nats - best.nats < best.gap_stderr(others[0])
        self.num_questions, self.num_undecided = self.num_questions + num, self.num_undecided + num_undecided
        if num_undecided:
            logger.warning(
                f"{num_undecided} of {num} questions: the two most likely answers differ by less than the Monte Carlo "
                "standard error of their difference, so their order is chance; lower the error with "
                "--model_args target_stderr=0.5, up to max_samples, or with more samples"
            )

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """A lower bound on log p of every text, in windows as of `adlm perplexity`: with the eos after it."""
        replicates = 1 if self.score != "bound" else min(REPLICATES, self.samples)
        settings = PerplexitySettings(
            estimator=AUTO if self.score == "bound" else self.score,
            samples=replicates,
            seed=self.seed,
            batch=self.settings.batch,
            repeats=1 if self.score != "bound" else -(-self.samples // replicates),
        )
        results, stderrs = [], []
        for (text,) in tqdm(
            [request.args for request in requests], desc="Running rolling requests", disable=disable_tqdm
        ):
            estimate = None
            if text:
                rows = rows_of_texts([text], self.text_tokenizer, self.length)
                estimate = summarize(measure_nats(self.model.method, self.model.network, rows, settings))
            results.append(0.0 if estimate is None else -estimate.nats * estimate.tokens)
            stderrs.append(0.0 if estimate is None else (estimate.monte_carlo or 0.0) * estimate.tokens)
            self.cache_hook.add_partial("loglikelihood_rolling", (text,), results[-1])
        self._log_stderrs(stderrs)
        return results

    def _encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """By the rule of the harness: spaces at the end of the context are encoded with the continuation."""
        given = context.rstrip()
        ids = self.text_tokenizer.encode(given)
        return ids, self.text_tokenizer.encode(given + context[len(given) :] + continuation)[len(ids) :]

    def _rows(self, context: Sequence[int], continuation: Sequence[int]) -> Iterator[ConditionalRow]:
        """One row. A continuation longer than that is cut into blocks, each with the tokens before it as its context.

        By the chain rule the sum of their scores is that of the continuation, except that contexts are cut.
        """
        most = self.room - len(self.end)
        block = len(continuation) if len(continuation) <= most else most // 2
        if block < len(continuation):
            self._warn_once(f"continuations longer than {most} tokens are scored in blocks of {block}")
        ids = [*context, *continuation]
        for start in range(len(context), len(ids), block or 1):
            stop = min(start + block, len(ids))
            first = max(0, stop - most)
            if first > 0:
                self._warn_once(f"contexts are cut on the left to fit the length of {self.length} tokens")
            yield ConditionalRow((*self.bos, *ids[first:start]), tuple(ids[start:stop]), tuple(self.end))

    def _log_stderrs(self, stderrs: list[float]) -> None:
        self.stderrs += stderrs
        if stderrs and not self.is_exact:
            logger.info(
                f"mean Monte Carlo standard error of {len(stderrs):,} log-likelihoods: "
                f"{sum(stderrs) / len(stderrs):.3g} nats with samples={self.samples}"
            )

    # Generation

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """The text that the sampler writes after each context, up to the first stop string or eos.

        A context with holes, such as [MASK*12], is returned as a whole, with its holes filled in.
        """
        seen: Counter[str] = Counter()
        rows = []
        for request in requests:
            context, options = request.args
            key = f"{context} {options}"
            rows.append(self._generation(context, options, crc32(f"{seen[key]} {context}".encode())))
            seen[key] += 1  # requests that are repeated are sampled with other random numbers
        texts = [""] * len(rows)
        with tqdm(total=len(rows), desc="Running generate_until requests", disable=disable_tqdm) as bar:
            for batch in self._batches(rows):
                for index, text in zip(batch, self._generate([rows[index] for index in batch]), strict=True):
                    texts[index] = text
                    self.cache_hook.add_partial("generate_until", requests[index].args, text)
                bar.update(len(batch))
        return texts

    def _generation(self, context: str, options: dict[str, Any], rng_row: int) -> Generation:
        normalized = dict(normalize_gen_kwargs(options))
        until, num_masks = normalized.pop("until"), normalized.pop("max_gen_toks")
        is_greedy = not normalized.pop("do_sample")
        ignored = [name for name in normalized if name not in SAMPLING_OPTIONS]
        if ignored:
            self._warn_once(f"generation options without effect: {', '.join(ignored)}")
        chosen = {name: value for name, value in normalized.items() if name in SAMPLING_OPTIONS}
        sampling = self.model.sampling(**self.sampling_options | chosen | ({"temperature": 0.0} if is_greedy else {}))
        has_holes = HOLE.search(context) is not None
        if has_holes:
            ids, num_given = self._holes(context), None
        else:
            ids, num_given = self._prompt(context, whole_number("max_gen_toks", num_masks, 1))
        return Generation((*self.bos, *ids), num_given, tuple(until), sampling, rng_row)

    def _holes(self, context: str) -> list[int]:
        """The ids of a context with holes, cut on the left."""
        ids = encode_canvas(context, self.text_tokenizer, self.model.open_id, self.length)
        ids += self.end if ids[-1] == self.model.mask_id else []  # as `LanguageModel.canvas` of closed texts
        masked = [index in (self.model.mask_id, self.model.open_id) for index in ids]
        if self.model.method.cached and self.model.config.model.hole_id is None and masked != sorted(masked):
            raise UserError(
                f"a context has a hole before other text, and {self.model.config.method} writes from left to right; "
                "use a diffusion model"
            )
        first = max(0, len(ids) - self.room)
        if any(masked[:first]):
            raise UserError(
                f"a context with holes has {len(ids)} tokens, and only the last {self.room} fit the length of "
                f"{self.length}; shorten the text after its first hole"
            )
        return self._cut(ids, self.room)

    def _prompt(self, context: str, num_masks: int) -> tuple[list[int], int]:
        """The ids of a context and masks after it, and where the masks begin.

        What does not fit is cut from the left of the context; at most half of the room is taken for masks then.
        """
        ids = encode_canvas(f"{context}[MASK]", self.text_tokenizer)[:-1]
        fitting = min(num_masks, max(self.room - len(ids), (self.room + 1) // 2))
        if fitting < num_masks:
            self._warn_once(f"max_gen_toks {num_masks} is reduced to fit the length of {self.length} tokens")
        ids = self._cut(ids, self.room - fitting)
        return ids + [self.model.mask_id] * fitting, len(ids)

    def _cut(self, ids: list[int], most: int) -> list[int]:
        if len(ids) > most:
            self._warn_once(f"contexts are cut on the left to fit the length of {self.length} tokens")
        return ids[len(ids) - most :] if len(ids) > most else ids

    def _batches(self, rows: Sequence[Generation]) -> Iterator[list[int]]:
        """Indices of rows with the same sampling options, the longest first."""
        by_sampling: dict[Sampling, list[int]] = {}
        for index in sorted(range(len(rows)), key=lambda index: -len(rows[index].ids)):
            by_sampling.setdefault(rows[index].sampling, []).append(index)
        for indices in by_sampling.values():
            while indices:
                num = self.settings.rows_at_once(len(rows[indices[0]].ids), self.model.device)
                yield indices[:num]
                indices = indices[num:]

    def _generate(self, rows: Sequence[Generation]) -> list[str]:
        starts = [len(self.bos)] * len(rows)
        canvas = make_canvas([row.ids for row in rows], self.model.fill_id, starts)
        request = SampleSettings(rows[0].sampling, canvas=canvas)
        run = self.model.plan(request, RowRng(self.seed, [row.rng_row for row in rows]))
        frames = run.frames()
        if self.model.method.cached and not sampler_of(request.sampling).remasks:
            frames = self._until_all_end(rows, frames)
        return [self._text(row, ids) for row, ids in zip(rows, run.filled(frames), strict=True)]

    def _until_all_end(self, rows: Sequence[Generation], frames: Iterator[Frame]) -> Iterator[Frame]:
        """The frames until every row has a stop string or a special token: with a KV cache text is final at once."""
        going_on = list(range(len(rows)))
        for frame in frames:
            yield frame
            going_on = [index for index in going_on if not self._has_ended(rows[index], frame.ids[index].tolist())]
            if not going_on:
                return

    def _has_ended(self, row: Generation, ids: list[int]) -> bool:
        """Whether the text of a row is complete before its first mask."""
        known = list(takewhile(lambda index: index != self.model.mask_id, ids[len(self.bos) : len(row.ids)]))
        if row.num_given is None or len(known) == len(row.ids) - len(self.bos):
            return row.num_given is not None
        text, has_special = self._written(row, known)
        return has_special or any(stop and stop in text for stop in row.until)

    def _text(self, row: Generation, ids: list[int]) -> str:
        if row.num_given is None:
            return self.text_tokenizer.decode(ids, special_tokens=False)
        return str(postprocess_generated_text(self._written(row, ids)[0], list(row.until), None))

    def _written(self, row: Generation, ids: list[int]) -> tuple[str, bool]:
        """The text after the context, up to the first special token, and whether there is one."""
        tokenizer, num_given = self.text_tokenizer, cast(int, row.num_given)
        end = next((index for index in range(num_given, len(ids)) if ids[index] in tokenizer.special_ids), len(ids))
        before, whole = tokenizer.decode(ids[:num_given]), tokenizer.decode(ids[:end])
        alone = tokenizer.decode(ids[num_given:end])  # without the space that some decoders omit at the start
        return whole.removeprefix(before) if whole.startswith(before) else alone, end < len(ids)

    def _warn_once(self, message: str) -> None:
        if message not in self._warned:
            self._warned.add(message)
            logger.warning(message)


def run_harness(arguments: Sequence[str]) -> None:
    """The command line of the harness, `lm-eval ARGUMENTS`, in this process."""
    argv = sys.argv
    sys.argv = ["lm-eval", *arguments]
    try:
        cli_evaluate()
    finally:
        sys.argv = argv


def _sum(blocks: Sequence[ConditionalNats]) -> ConditionalNats:
    """The score of a continuation in blocks. Blocks of one length share their masks, so their errors are added up."""
    errors: dict[int, tuple[float, ...]] = {}
    for block in blocks:
        before = errors.get(block.num_tokens)
        added = (sum(pair) for pair in zip(before, block.errors, strict=True)) if before else block.errors
        errors[block.num_tokens] = tuple(added)
    return ConditionalNats(
        sum(block.nats for block in blocks),
        all(block.greedy for block in blocks),
        sum(block.num_tokens for block in blocks),
        tuple(error for of_one_length in errors.values() for error in of_one_length),
    )
