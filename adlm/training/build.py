"""Builds the TrainState of a run: a network that is initialized, compiled and sharded. No data, steps or files."""

import os
import shutil
import warnings
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils.checkpoint import checkpoint

from adlm.checkpoints.adapter import Adapter, add_lora_of
from adlm.checkpoints.model_folder import check_fit
from adlm.config.schema import Config, Train
from adlm.distributed import Processes, device_name
from adlm.errors import UserError
from adlm.methods.method import Method
from adlm.models.anchored import start_from_unigram
from adlm.models.float8 import MULTIPLE, use_float8
from adlm.models.heads import why_no_triton
from adlm.models.lora import start_from_adapter, trained_parameters
from adlm.models.transformer import Trunk, each_block, on_meta
from adlm.training.metrics import flops_per_token
from adlm.training.sharding import blocks_of, shard_network
from adlm.training.step import TrainState, new_train_state, seed_of

# fallback_random uses torch's own dropout kernel, so that a seed gives the same masks compiled or not. It costs
# nothing: 197 ms per step, against 199 ms with random numbers generated in the compiled kernels (H200, batch 64).
OPTIONS: dict[str, str | int | bool | Callable[..., Any]] = {"fallback_random": True}
OPTIONAL = ("chain.", "memory.", "anchor.memory.")
"""How the names of weights begin that a model may get or lose when it is trained further."""


def build_train_state(
    method: Method,
    processes: Processes,
    report: Callable[[str], None],
    log_frequencies: Tensor | None = None,
    anchor_table: Tensor | None = None,
    weights: Mapping[str, Tensor] | None = None,
    adapter: Adapter | None = None,
) -> TrainState:
    """A new network, sharded and initialized identically for any number of processes.

    The output heads start at `log_frequencies` (V,), and a table of rates at the anchors (V,), if given; `weights`, if
    given, replace the initial ones. LoRA starts from `adapter`, if given.
    """
    train = method.config.train
    torch.manual_seed(seed_of(train.seed, "weights"))
    set_start = partial(_set_start, log_frequencies=log_frequencies, anchor_table=anchor_table)
    blocks: list[nn.Module] | None = None
    if weights is None and not train.lora_rank:
        blocks = []
        with each_block(blocks.append):
            network = on_meta(method.build)
    else:
        network = method.build()
        set_start(network)
    if weights is not None:
        optional = {name: value for name, value in network.state_dict().items() if name.startswith(OPTIONAL)}
        weights = optional | _without_lost(weights, optional)
        try:
            check_fit(network.state_dict(), weights, method.config)
        except UserError as error:
            raise UserError(
                f"init {method.config.init} does not fit: {error}; leave out method and the options of model"
            ) from None
        if train.lora_rank:  # frozen weights are not copied
            network.load_state_dict({name: value.float() for name, value in weights.items()}, assign=True)
        else:
            network.load_state_dict(weights)
    if train.lora_rank:
        add_lora_of(network, method.config)
        if adapter is not None:
            own = _without_lost(adapter.weights, network.state_dict())
            if missing := sorted(own.keys() - trained_parameters(network).keys()):
                raise UserError(
                    f"init {method.config.init} does not fit: it trained {missing[0]}, which this network lacks or "
                    "leaves frozen; leave out method, the options of model, and train.lora_norms=false"
                )
            start_from_adapter(network, own, adapter.config.train.lora_scale)
    if blocks is None:
        network = network.to(processes.device)
    if train.precision == "float64":
        network = network.double()
    flops = flops_per_token(method, network, processes.device)
    if train.precision == "float8":
        use_float8(network)
    if train.recompute:
        recompute_blocks(network)
    if should_compile(train, processes.device) and (problem := compile_trunks(network, device=processes.device)):
        report(problem)
    shard_network(network, processes)
    if blocks is not None:
        network.to_empty(device=processes.device)
        _initialize(network, blocks, method, set_start)
    return new_train_state(method, network.train(), autocast_dtype(train, processes.device), flops)


def _set_start(network: nn.Module, log_frequencies: Tensor | None, anchor_table: Tensor | None) -> None:
    """What of a new network depends on the text: biases of heads, and a table of rates."""
    if log_frequencies is not None:
        start_from_unigram(network, log_frequencies)
    if anchor_table is not None:
        network.rates.set_table(anchor_table)  # type: ignore[union-attr, operator]


def _initialize(
    network: nn.Module, blocks: Iterable[nn.Module], method: Method, set_start: Callable[[nn.Module], None]
) -> None:
    """Copy what `method.build()` gives into an empty network, which may be sharded.

    The host holds one block at a time and what is in none, never all weights. `blocks` are those of the network in
    the order in which they are built, which is that of the random numbers.
    """
    places = iter(blocks)

    def place(block: nn.Module) -> None:
        _copy_weights(next(places), block)
        block.to("meta")

    with each_block(place):
        source = method.build()
    set_start(source)
    _copy_weights(network, source)


@torch.no_grad()
def _copy_weights(module: nn.Module, source: nn.Module) -> None:
    """Copy all tensors of `source` that are not on meta, one at a time; of sharded ones each process its shard."""
    tensors = dict([*module.named_parameters(), *module.named_buffers()])
    for name, value in [*source.named_parameters(), *source.named_buffers()]:
        if value.is_meta:
            continue
        own, whole = tensors[name], value.detach()
        if isinstance(own, DTensor):
            whole = distribute_tensor(whole.to(own.device), own.device_mesh, own.placements, src_data_rank=None)
        own.copy_(whole)


def _without_lost(weights: Mapping[str, Tensor], kept: Iterable[str]) -> dict[str, Tensor]:
    """The weights without those OPTIONAL ones of which none is kept."""
    lost = tuple(part for part in OPTIONAL if not any(name.startswith(part) for name in kept))
    return {name: value for name, value in weights.items() if not name.startswith(lost)}


def check_precision(config: Config, device: torch.device) -> None:
    """A user error for train.precision float8 where its products cannot run."""
    train, model = config.train, config.model
    if train.precision != "float8":
        return
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < (8, 9):
        raise UserError(
            "train.precision float8 needs a GPU with 8-bit products (Ada, Hopper or newer), and this is "
            f"{device_name(device)}; use train.precision=auto"
        )
    if train.lora_rank:
        raise UserError(
            f"train.precision float8 is for training all weights, and train.lora_rank is {train.lora_rank}; use "
            "train.precision=auto"
        )
    keys = model.hidden // model.heads * model.num_kv_heads
    widths = {"model.hidden": model.hidden, "model.mlp": model.mlp_width, "model.kv_heads gives keys of width": keys}
    for name, width in widths.items():
        if width % MULTIPLE:
            raise UserError(
                f"train.precision float8 needs multiples of {MULTIPLE}: {name} {width}; change it, or use "
                "train.precision=auto"
            )


def autocast_dtype(train: Train, device: torch.device) -> torch.dtype | None:
    if train.precision == "auto":
        return torch.bfloat16 if device.type == "cuda" else None
    return torch.bfloat16 if train.precision in ("bfloat16", "float8") else None


def should_compile(train: Train, device: torch.device) -> bool:
    return train.compile == "on" or (train.compile == "auto" and device.type == "cuda")


def recompute_blocks(network: nn.Module) -> None:
    """Let each block store its input only and be recomputed in the backward pass. Before the blocks are compiled."""
    for block in blocks_of(network):
        block.forward = _recomputed(block.forward)


def _recomputed(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def recomputed(*inputs: Any) -> Tensor:
        return checkpoint(forward, *inputs, use_reentrant=False)  # type: ignore[no-any-return]

    # A function, not partial(checkpoint, forward): torch.compile starts at the first call that is not in PyTorch's own
    # code, and does not start inside of an uncompiled checkpoint. With partial the blocks silently ran uncompiled.
    return recomputed


def compile_trunks(network: nn.Module, backend: str = "inductor", device: torch.device | None = None) -> str:
    """Compile every trunk of the network in place. Returns "", or a message that says why that is not possible.

    Only trunks have static shapes: position selection and the chunked cross-entropy have data-dependent sizes.
    Blocks are compiled one by one: they all share one graph, which compiles in seconds, and FSDP2 can gather the
    weights of a block around it (compile first, then shard). Whole trunks took seven times as long to compile and were
    not faster. With a backend other than inductor ("eager", to inspect the graphs), availability is not checked.
    `device` is where the weights will be, if they are not there yet.
    """
    options = OPTIONS if backend == "inductor" else None
    device = device or next(network.parameters()).device
    if options and device.type == "cuda":
        _compile_in_this_process()
    reason = why_not_compile(device) if options else ""
    if reason:
        return f"the networks are not compiled, which is slower: {reason}"
    for trunk in network.modules():
        if isinstance(trunk, Trunk):
            for block in trunk.blocks:
                block.compile(backend=backend, options=options)
            trunk.finish = torch.compile(trunk.finish, backend=backend, options=options)  # type: ignore[method-assign]
    return ""


def _compile_in_this_process() -> None:
    """Let PyTorch's compiler start no workers, unless TORCHINDUCTOR_COMPILE_THREADS asks for them.

    PyTorch would start a process for every core, even for blocks that come from the compiler's cache, and while they
    start, for about five seconds, Python launches kernels at half its speed: on an H200 the first 40 steps of 12 small
    blocks took 112 ms each instead of 56. The workers saved half a second of nine.
    """
    if "TORCHINDUCTOR_COMPILE_THREADS" not in os.environ:
        torch._inductor.config.compile_threads = 1


def why_not_compile(device: torch.device) -> str:
    """Why torch.compile does not work on this device, found by compiling a small function; empty if it works."""
    if device.type not in ("cpu", "cuda"):
        return f"torch.compile is not supported on {device.type}"
    missing = why_no_triton() if device.type == "cuda" else why_no_cpp()
    if missing:
        return missing
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.compile(lambda numbers: numbers.sin() + 1)(torch.ones(8, device=device))
    except (RuntimeError, OSError) as error:
        return f"torch.compile failed on a small function ({type(error).__name__})"
    return ""


def why_no_cpp() -> str:
    """Why torch.compile cannot compile for the CPU; empty if there is a C++ compiler."""
    compilers = torch._inductor.config.cpp.cxx
    names = [name for name in (compilers if isinstance(compilers, (tuple, list)) else [compilers]) if name]
    if any(shutil.which(name) for name in names):
        return ""
    return f"there is no C++ compiler ({' or '.join(names)})"
