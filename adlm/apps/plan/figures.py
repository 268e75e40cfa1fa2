"""What the plan of a run is based on: assumptions, and what was measured on one H200. Imports no torch."""

from dataclasses import dataclass

USABLE = 0.92
"""Assumption: the share of the memory that is left beside the CUDA context, NCCL's buffers and fragmentation."""


# Measured with `adlm bench train owt/adlm --batch 64 --profile` (experiments/train_speed/log.txt): a step of 65,536
# tokens takes 197.1 ms, its matrix products and attention 132.6 ms for 81.5 TFLOP, the update of 293 million parameters
# 4.1 ms, other kernels the rest.
PRODUCTS = 81.5 / 0.1326 / 989
"""The share of the datasheet's FLOP/s that matrix products and attention reach."""
UPDATE_BYTES = 0.0041 * 4.8e12 / 293_189_028
"""What the update takes (gradient norm, AdamW, EMA), per trained parameter, as bytes moved at that bandwidth."""
OTHER_BYTES = (0.1971 - 0.1326 - 0.0041) * 4.8e12 / (65_536 * 18 * 768)
"""What other kernels take, per token, block and hidden unit, as bytes moved at the bandwidth of the memory."""
EAGER_TIME = 170.6 / 104.4
"""The time of a step without torch.compile, over that with it."""
EAGER_BYTES = 59 / 40
"""What blocks keep for the backward pass without torch.compile, over that with it: fitted to 31.4 GiB, not counted."""
HOST_SECONDS = 0.0591 / 18
"""Per block and micro-batch: what the host takes to launch the kernels, by a step of one sequence."""
HOST_SECONDS_FSDP = 0.1428 / 18
"""The same under FSDP2, by one process (experiments/train_gpu/log.txt); GPUs are idle where this is the longer time."""
LARGEST_MFU = 0.541
"""The largest MFU measured: 3 billion parameters, 16 sequences a step, no EMA (`run-3b` of experiments/growth)."""
LARGEST_HIDDEN = 3072
"""The widest network measured."""


@dataclass(frozen=True)
class Measurement:
    """A training run or benchmark on one H200, with torch 2.11."""

    words: str
    """What `adlm plan` is called with."""
    gib: float
    """Largest memory allocated by torch."""
    tokens_per_second: float | None
    """None where the GPU waited for a busy host, or was shared with other runs."""
    source: str


_BPE = "tokenizer=bpe-8192 length=256 train.batch_size=256 model.hidden=512 model.heads=8"
_FINALS = "length=512 train.batch_size=128 model.dropout=0 train.optimizer=muon"
_SMOLLM2 = (
    "vocabulary.size=49153 vocabulary.mask_id=49152 length=258 train.batch_size=64 model.family=llama model.hidden=576 "
    "model.blocks=30 model.heads=9 model.kv_heads=3 model.mlp=1536 model.tie_embedding=true model.dropout=0"
)
_BLOCKS = "model.block_length=4 model.chain=512 train.causal_weight=0.5 time.t_min=0.45"
_SPEED, _ARENA, _GROWTH = "train_speed/log.txt", "arena/results.jsonl", "growth/results.jsonl"
MEASUREMENTS = (
    Measurement("owt/adlm train.batch_size=32", 23.4, 313_748, _SPEED),
    Measurement("owt/adlm train.batch_size=64", 40.9, 332_478, _SPEED),
    Measurement("owt/adlm train.batch_size=1", 5.9, 17_320, _SPEED),
    Measurement("owt/adlm train.batch_size=32 train.compile=off", 31.4, 192_112, _SPEED),
    Measurement("owt/mdlm train.batch_size=32", 15.2, 520_358, _SPEED),
    Measurement(f"owt/adlm {_FINALS} model.bridge=hidden", 38.0, 345_174, _ARENA),
    Measurement(f"owt/mdlm {_FINALS} model.blocks=18", 36.65, 355_774, _ARENA),
    Measurement(f"owt/mdlm {_FINALS} model.blocks=24", 47.99, 277_758, _ARENA),
    Measurement(f"owt/adlm {_BPE} model.blocks=8 model.denoiser_blocks=4", 17.55, 1_167_789, _ARENA),
    Measurement(
        f"owt/adlm {_BPE} model.blocks=8 model.denoiser_blocks=4 model.dropout=0 model.bridge=hidden",
        16.72,
        1_183_530,
        _ARENA,
    ),
    Measurement(f"owt/mdlm {_BPE} model.blocks=12 model.dropout=0", 16.22, 1_308_614, _ARENA),
    Measurement(f"owt/mdlm {_BPE} model.blocks=12 model.dropout=0 train.optimizer=muon", 16.09, 1_240_577, _ARENA),
    Measurement(f"owt/mdlm {_BPE} model.blocks=6 model.dropout=0 train.optimizer=muon", 8.67, None, _ARENA),
    Measurement(f"owt/a2r {_BPE} model.blocks=8 model.denoiser_blocks=4 model.dropout=0", 16.7, None, _ARENA),
    Measurement(f"owt/ar {_BPE} model.blocks=12 model.dropout=0", 16.2, None, _ARENA),
    Measurement(f"method=ar {_SMOLLM2}", 12.81, None, "adapt/curves/causal-mix.jsonl"),
    Measurement(f"method=mdlm {_SMOLLM2} {_BLOCKS}", 25.98, None, "adapt/curves/blocks4.jsonl"),
    Measurement(f"method=mdlm {_SMOLLM2} {_BLOCKS.replace('=4 ', '=16 ')}", 23.81, None, "adapt/curves/blocks16.jsonl"),
    Measurement("owt/mdlm model=1b train.batch_size=32", 59.10, 91_743, _GROWTH),
    Measurement("owt/adlm model=1b train.batch_size=24", 75.34, 57_412, _GROWTH),
    Measurement("owt/mdlm model=3b train.batch_size=12", 86.94, 28_051, _GROWTH),
    Measurement("owt/mdlm model=3b train.batch_size=4", 63.83, 23_015, _GROWTH),
    Measurement(
        "owt/mdlm model=3b train.batch_size=16 train.ema=0 vocabulary.size=49353 vocabulary.mask_id=49352",
        86.76,
        30_017,
        _GROWTH,
    ),
    Measurement("owt/mdlm model=1b train.batch_size=24 train.recompute=true", 21.35, None, "growth/recompute.json"),
)
