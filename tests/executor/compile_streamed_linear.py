"""Compiles the streamed product for Hopper, where no GPU is: ``python -m`` this module.

Run by `test_streamed_linear` in a process of its own, as Triton decides at import whether it
compiles or interprets. Prints what it compiled.
"""

from __future__ import annotations

import triton
import triton.experimental.gluon.language as gl
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource

from gapless.executor import streamed_linear

HOPPER = GPUTarget("cuda", 90, 32)
SHARED_BYTES_MAX = 227 << 10


def compile_one(rows: int, dtype: str, *, is_gated: bool, has_bias: bool) -> None:
    """Compiles the kernel as it is launched for `rows` rows of `dtype`, bf16 or fp16."""
    tiling = streamed_linear.tiling(rows, 4096, 4096, gated=is_gated, split=not is_gated)
    outs, ins = streamed_linear.TILE_OUTS, streamed_linear.TILE_INS
    kind = gl.bfloat16 if dtype == "bf16" else gl.float16
    blocks = [outs, ins], [tiling.rows, ins]
    weight, x = (
        f"tensordesc<{dtype}{block},{gl.NVMMASharedLayout.get_default_for(block, kind)!r}>"
        for block in blocks
    )
    constants = {
        "TILE_OUTS": outs,
        "TILE_ROWS": tiling.rows,
        "TILE_INS": ins,
        "STAGES": tiling.stages,
        "GATED": is_gated,
        "HAS_BIAS": has_bias,
    }
    signature = {
        "weight": weight,
        "x": x,
        "bias": f"*{dtype}",
        "out": f"*{dtype}" if is_gated else "*fp32",
        **dict.fromkeys(("rows", "outs", "tiles", "depth"), "i32"),
        **dict.fromkeys(constants, "constexpr"),
    }
    source = GluonASTSource(streamed_linear._streamed_linear, signature, constexprs=constants)
    compiled = triton.compile(source, target=HOPPER, options={"num_warps": 4, "launch_pdl": True})
    ptx = compiled.asm["ptx"]
    for part in ("wgmma.mma_async", "cp.async.bulk.tensor", "griddepcontrol.wait"):
        assert part in ptx, part
    assert compiled.metadata.shared <= SHARED_BYTES_MAX, compiled.metadata.shared
    print("compiled", rows, dtype, "gated" if is_gated else "plain", flush=True)


if __name__ == "__main__":
    for row_count in (1, 32, 64):
        compile_one(row_count, "bf16", is_gated=True, has_bias=False)
        compile_one(row_count, "bf16", is_gated=False, has_bias=True)
    compile_one(8, "fp16", is_gated=False, has_bias=False)
