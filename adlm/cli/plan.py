"""`adlm plan`: the memory, speed and time of a run on given GPUs, before any of them is used."""

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from adlm.apps.plan.figures import HOST_SECONDS, HOST_SECONDS_FSDP, LARGEST_HIDDEN, LARGEST_MFU, PRODUCTS, USABLE
from adlm.config.load import resolve
from adlm.config.schema import Config
from adlm.errors import UserError
from adlm.request import Request, option
from adlm.training.gpus import GPUS

if TYPE_CHECKING:  # importing torch takes seconds
    from adlm.apps.plan.estimate import Plan, PlanCheck

Changes = Mapping[str, int]
"""Values of options of `train`."""


@dataclass(frozen=True)
class PlanRequest(Request):
    """The options of `adlm plan`."""

    example = """adlm plan owt/adlm --gpus 64 --gpu h100
  adlm plan owt/mdlm model=7b recipe/sharded --gpus 64
  adlm plan --check"""

    overrides: tuple[str, ...] = option(
        "a preset or .yaml file, section=preset, or option=value, as for `adlm train`", (), positional=True
    )
    gpus: int = option("number of GPUs, one process each", 1, minimum=1, maximum=2**20)
    gpu: str = option(
        "kind of the GPUs", "h100", choices={name: f"{gpu.title}, {gpu.tflops:g} TFLOP/s" for name, gpu in GPUS.items()}
    )
    efficiency: float = option(
        "with several GPUs: the share of the speed that their communication leaves, an assumption (default: 0.9)",
        0.9,
        minimum=0.01,
        maximum=1,
    )
    check: bool = option("compare plans with what was measured on one H200, instead of planning a run", False)
    json: bool = option("print JSON", False)


def run(request: PlanRequest) -> int:
    if request.check and request.overrides:
        raise UserError(f"--check takes no config; leave out {' '.join(request.overrides)}")
    if not request.check and not request.overrides:
        raise UserError("no preset or option is given; try `adlm plan owt/adlm --gpus 8`, or --check")
    config = resolve(request.overrides) if request.overrides else Config()
    if config.reason is not None:
        raise UserError(f"adlm plan is for `adlm train`, and reason.method {config.reason.method} is another command's")
    from adlm.apps.plan.estimate import Machines, checks, plan, suggestion
    from adlm.data.prepare.prepared import open_prepared, weighted_folders
    from adlm.tokens import with_vocabulary

    found = checks()
    if request.check:
        text = json.dumps([_check_as_json(check) for check in found]) if request.json else _format_checks(found)
    else:
        if config.data.prepared:
            folder = next(iter(weighted_folders(config.data.prepared)))  # all have one tokenizer
            config = replace(config, vocabulary=open_prepared(folder, sums=False).tokenizer.vocabulary)
        config, machines = with_vocabulary(config), Machines(GPUS[request.gpu], request.gpus, request.efficiency)
        planned = plan(config, machines)
        fitting = None if planned.fits else suggestion(config, machines)
        if request.json:
            text = json.dumps(_as_json(request, planned, fitting, found))
        else:
            lines = [*_format_plan(config, request, planned), *_format_fit(planned, fitting)]
            text = "\n".join([*lines, *_assumptions(config, request, planned, found)])
    sys.stdout.write(f"{text}\n")
    return 0


def _format_plan(config: Config, request: PlanRequest, planned: "Plan") -> list[str]:
    gpu, train = GPUS[request.gpu], config.train
    frozen = "" if planned.trained == planned.parameters else f", of which {planned.trained:,} are trained"
    parts = [f"{name:18} {size:9.2f} GiB" for name, size in planned.gib.items() if size]
    slower = ""
    if planned.days_at_measured_mfu > planned.days:
        slower = f"; {_days(planned.days_at_measured_mfu)} at the largest MFU measured, {LARGEST_MFU:.0%}"
    return [
        f"{config.method} on {request.gpus:,} x {gpu.title}: extrapolated from measurements on one H200",
        f"parameters         {planned.parameters:,}{frozen}",
        f"step               {train.batch_size:,} sequences of {config.length:,} tokens; on each GPU "
        f"{planned.micro_batches:,} x {planned.micro_batch:,}, weights sharded over {train.shard:,}",
        "memory of each GPU, when it is largest",
        *(f"  {part}" for part in parts),
        f"  {'total':18} {planned.total_gib:9.2f} GiB of {planned.usable_gib:.1f} GiB usable",
        f"speed              {planned.tokens_per_second:,.0f} tokens/s, MFU {planned.mfu:.1%}"
        + (", waiting for the host: larger micro-batches are faster" if planned.waits_for_host else ""),
        f"time               {_days(planned.days)} for train.steps {train.steps:,}{slower}",
    ]


def _days(days: float) -> str:
    return f"{days:,.1f} days" if days >= 1 else f"{24 * days:.2g} hours"


def _format_fit(planned: "Plan", fitting: "tuple[Changes, Plan] | None") -> list[str]:
    if planned.fits:
        return ["it fits"]
    if fitting is None:
        return [
            "it does NOT fit, with no train.micro_batch, train.recompute=true and train.shard up to --gpus; use more "
            "GPUs (--gpus), a larger kind (--gpu), a smaller model or length"
        ]
    changes, smaller = fitting
    return [
        f"it does NOT fit; with {' '.join(_overrides(changes))} it does: {smaller.total_gib:.2f} GiB, "
        f"{smaller.tokens_per_second:,.0f} tokens/s, {_days(smaller.days)}"
    ]


def _overrides(changes: "Changes") -> list[str]:
    return [f"train.{name}={str(value).lower()}" for name, value in changes.items()]


def _assumptions(config: Config, request: PlanRequest, planned: "Plan", found: "Sequence[PlanCheck]") -> list[str]:
    lines = [
        f"on one H200 the memory is off by at most {_largest(check.memory_error for check in found):.0%}, the speed by "
        f"at most {_largest(check.speed_error for check in found):.0%} ({len(found)} measurements: adlm plan --check)",
        f"products and attention at {PRODUCTS:.0%} of the datasheet's FLOP/s, other kernels by memory bandwidth, as "
        "measured there",
        f"{USABLE:.0%} of the memory is usable: the CUDA context, NCCL and fragmentation take the rest",
    ]
    if request.gpus > 1:
        lines.append(
            f"--efficiency {request.efficiency:g}: what communication leaves of the speed; runs on several GPUs were "
            "not measured"
        )
    if planned.waits_for_host:
        seconds = HOST_SECONDS_FSDP if request.gpus > 1 else HOST_SECONDS
        lines.append(f"the host needs {1e3 * seconds:.1f} ms for each block and micro-batch, as the one measured there")
    if config.model.hidden > LARGEST_HIDDEN:
        lines.append(f"networks wider than model.hidden {LARGEST_HIDDEN} were not measured")
    if request.gpu != "h200":
        lines.append(f"{GPUS[request.gpu].title} was not measured: it is scaled by its datasheet")
    if not_measured := _not_measured(config):
        lines.append(f"not measured: {', '.join(not_measured)}")
    return ["assumptions", *(f"  {line}" for line in lines)]


def _not_measured(config: Config) -> list[str]:
    """Options of the config that no measurement has, and that change the memory or the time."""
    model, train = config.model, config.train
    return [
        option
        for option, is_set in (
            (f"method {config.method}", config.method in ("sedd", "d3pm")),
            ("model.family gpt2", model.family == "gpt2"),
            ("the speed of model.family llama", model.family == "llama"),
            ("the speed of model.block_length", model.block_length > 0),
            ("model.memory", model.memory),
            ("rates.rule", config.rates.rule != "none"),
            ("train.lora_rank", train.lora_rank > 0),
            ("the speed of train.recompute", train.recompute),
            (f"train.precision {train.precision}: the speed is that of bf16", train.precision.startswith("float")),
        )
        if is_set
    ]


def _largest(errors: "Iterable[float | None]") -> float:
    return max(abs(error) for error in errors if error is not None)


def _as_json(
    request: PlanRequest, planned: "Plan", fitting: "tuple[Changes, Plan] | None", found: "Sequence[PlanCheck]"
) -> dict[str, Any]:
    return {
        "gpu": request.gpu,
        "gpus": request.gpus,
        "efficiency": request.efficiency,
        **asdict(planned),
        "total_gib": planned.total_gib,
        "fits": planned.fits,
        "fits_with": None if fitting is None else _overrides(fitting[0]),
        "largest_memory_error": _largest(check.memory_error for check in found),
        "largest_speed_error": _largest(check.speed_error for check in found),
    }


def _check_as_json(check: "PlanCheck") -> dict[str, Any]:
    return {
        **asdict(check.measurement),
        "planned_gib": check.gib,
        "memory_error": check.memory_error,
        "planned_tokens_per_second": check.tokens_per_second,
        "speed_error": check.speed_error,
    }


def _format_checks(found: "Sequence[PlanCheck]") -> str:
    """A table in Markdown, as in docs/plan.md."""
    lines = ["| config | GiB, measured | planned | tokens/s, measured | planned |", "|---|---|---|---|---|"]
    for check in found:
        measured, speed = check.measurement, "| | |"
        if measured.tokens_per_second is not None and check.speed_error is not None:
            planned = f"{check.tokens_per_second / 1e3:,.0f}k ({check.speed_error:+.1%})"
            speed = f"| {measured.tokens_per_second / 1e3:,.0f}k | {planned} |"
        lines.append(f"| `{measured.words}` | {measured.gib:.1f} | {check.gib:.1f} ({check.memory_error:+.1%}) {speed}")
    return "\n".join(lines)
