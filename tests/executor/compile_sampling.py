"""Compiles the kernels of truncated sampling for Hopper, without a GPU: ``python -m`` this module.

Run by `test_sampling_kernels` in a process of its own, as Triton decides at import whether it
compiles or interprets. Prints what it compiled.
"""

from __future__ import annotations

from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from gapless.executor import border_kernel, split_kernel
from gapless.executor.cuda_sampler import SAMPLE, TILE, sample_size, tile_places

HOPPER = GPUTarget("cuda", 90, 32)
TYPES = {
    "logits": "*bf16",
    "rows": "*i32",
    "row_max": "i32",
    "table": "*i32",
    "seat_words": "i32",
    "best_in": "*fp32",
    "scale_in": "*fp32",
    "states": "*i32",
    "kept_masses": "*fp64",
    "masses": "*fp64",
    "counts": "*i32",
    "candidates": "*fp32",
}
VOCAB_SIZES = (1_000, 128_256)
"""One tile, and many."""


def compile_one(kernel: Any, vocab_size: int, num_warps: int, *, is_last: bool = False) -> None:
    constants = {
        "VOCAB": vocab_size,
        "TILE": TILE,
        "TILES": tile_places(vocab_size, TILE),
        "SAMPLE": sample_size(vocab_size, SAMPLE),
        "LAST": is_last,
    }
    signature = {name: TYPES.get(name, "constexpr") for name in kernel.arg_names}
    used = {name: value for name, value in constants.items() if name in signature}
    source = ASTSource(kernel, signature, constexprs=used)
    triton.compile(source, target=HOPPER, options={"num_warps": num_warps})
    print("compiled", kernel.__name__, vocab_size, flush=True)


if __name__ == "__main__":
    for size in VOCAB_SIZES:
        compile_one(split_kernel.propose, size, 16)
        compile_one(split_kernel.split_tiles, size, 4)
        compile_one(border_kernel.find_borders, size, 16)
        compile_one(border_kernel.find_borders, size, 16, is_last=True)
