"""Compares a kernel under the interpreter with and without counting."""

from collections.abc import Iterator
from functools import partial

import torch

from benchmarks.compare import Row, one_thread, pairs, processor_seconds
from manyranks import kernels
from manyranks.measure import kernel

ROUNDS = 7
MOST = 3.0  # times the interpreter's own time


def rows() -> Iterator[Row]:
    x, square, (q, k, v) = torch.randn(64, 300), torch.randn(128, 128), torch.randn(3, 1, 2, 96, 32)
    launchers = {
        "copy of 20,000 elements": partial(kernels.copy, torch.randn(20_000)),
        "transpose of 64 × 300": partial(kernels.transpose, x),
        "softmax of 64 × 300": partial(kernels.softmax, x),
        "product of 128³": partial(kernels.product, square, square, 32, 32, 32),
        "FlashAttention, 96 tokens": partial(kernels.flash_attention, q, k, v, queries=32, keys=32),
    }
    with one_thread():
        for what, launch in launchers.items():
            counted = partial(processor_seconds, partial(kernel.count, launch))
            yield Row(f"{what}: counted; not", **pairs(counted, partial(processor_seconds, launch), ROUNDS), ratio_at_most=MOST)
