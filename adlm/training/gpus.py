"""Kinds of GPUs, by their datasheets. Imports no torch."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Gpu:
    title: str
    device: str
    """Part of the name that its driver reports."""
    memory_gib: float
    """As its driver reports it."""
    tflops: float
    """Dense bf16 TFLOP/s."""
    bandwidth: float
    """Of the memory, in TB/s."""


GPUS = {
    "h200": Gpu("H200 141 GB", "H200", 140.4, 989, 4.8),
    "h100": Gpu("H100 SXM 80 GB", "H100", 79.6, 989, 3.35),
    "b200": Gpu("B200 180 GB", "B200", 179.0, 2250, 8.0),
    "a100": Gpu("A100 SXM 80 GB", "A100", 80.0, 312, 2.04),
    "a100-40gb": Gpu("A100 SXM 40 GB", "A100", 40.0, 312, 1.56),
    "l40s": Gpu("L40S 48 GB", "L40S", 45.0, 362, 0.86),
    "rtx4090": Gpu("GeForce RTX 4090 24 GB", "RTX 4090", 24.0, 165, 1.01),
}
