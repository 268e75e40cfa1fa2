"""What `adlm plan` says a block keeps for its backward pass is what torch.compile keeps."""

from dataclasses import replace

import pytest
import torch
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor import config as inductor
from torch._inductor.decomposition import select_decomp_table

from adlm.apps.plan.estimate import block_bytes
from adlm.config.schema import Model
from adlm.models.layers import rotary_angles
from adlm.models.transformer import Trunk

LENGTH, MODEL = 64, Model(hidden=128, heads=2, blocks=1, condition=8, dropout=0.0)
MODELS = {
    "published": MODEL,
    "with dropout": replace(MODEL, dropout=0.1),
    "with normed queries": replace(MODEL, qk_norm=True),
    "llama": replace(MODEL, family="llama", mlp=384, kv_heads=1),
    "gpt2": replace(MODEL, family="gpt2", positions=LENGTH),
}


def kept_bytes(model: Model, rows: int) -> int:
    """The sizes of all tensors that the partitioner of torch.compile passes on to the backward pass."""
    block, sizes = Trunk(model, 1, causal=False, modulated=True).train().blocks[0], {}

    def partition(joint, *given, **named):
        forward, backward = min_cut_rematerialization_partition(joint, *given, **named)
        [output] = [node for node in forward.graph.nodes if node.op == "output"]
        for node in output.args[0][named["num_fwd_outputs"] :]:
            if isinstance(value := node.meta.get("val"), torch.Tensor):
                storage = value.untyped_storage()  # several tensors may be views of one
                sizes[storage._cdata] = storage.nbytes()
        return forward, backward

    torch._dynamo.reset()
    run = lambda graph, inputs: graph.forward  # noqa: E731
    backend = aot_autograd(
        fw_compiler=run, bw_compiler=run, partition_fn=partition, decompositions=select_decomp_table()
    )
    h = torch.randn(rows, LENGTH, model.hidden, requires_grad=True)
    angles = rotary_angles(LENGTH, model.hidden // model.heads, like=h)
    condition = torch.randn(1, model.condition) if model.family == "published" else None
    with inductor.patch(fallback_random=True), torch.autocast("cpu", torch.bfloat16):
        torch.compile(block, backend=backend, dynamic=False)(h, angles, condition, None).sum().backward()
    return sum(sizes.values())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_what_a_compiled_block_keeps_is_counted(model):
    kept = (kept_bytes(model, 6) - kept_bytes(model, 4)) / (2 * LENGTH)  # without weights
    assert block_bytes(model, 4, 2) == pytest.approx(kept, rel=0.01)
