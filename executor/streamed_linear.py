"""Linear layers of few rows, as fast as their weights stream from memory: a kernel in Gluon.

Owns the kernel, its tilings, and the question which weights it serves. Called by `fused`, on a GPU
with Hopper's matrix units only, as they are what it is written for.

A product of few rows is bound by reading the weight once. Libraries come near the memory's
bandwidth within one large product, but between two small ones the bus stands still: the last tile
is drained, a kernel ends, the next one starts and waits for its first tile. Here a kernel may start
while the one before it ends (programmatic dependent launch), fills its shared memory with weights,
which depend on nothing, and only then waits for its input.

Where one row of tiles has too few programs, the inner dimension is split. The partial sums stay
apart, in float32, and the next kernel adds them in a fixed order: no atomics, so the same input
gives the same output.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Final

import torch
import triton
import triton.experimental.gluon.language as gl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

ROW_MAX: Final = 64
"""Rows up to which this kernel is faster than the library's (measured, see benchmarks)."""
HOPPER: Final = (9, 0)
TILE_OUTS: Final = 64
TILE_INS: Final = 128
PROGRAMS: Final = 96
"""Programs from which on the memory is busy; with fewer tiles the inner dimension is split."""
STAGES: Final = {16: 5, 32: 4, 64: 6}
GATED_STAGES: Final = {16: 3, 32: 5, 64: 4}
"""Tiles in flight a program, by rows of a tile; what was fastest in a chain of layers."""

_fetch: Final = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
_meet: Final = getattr(gl, "barrier", None) or gl.thread_barrier
"""Gluon is young: names of triton up to 3.6, and of those after it."""


@dataclasses.dataclass(frozen=True, slots=True)
class Tiling:
    """How a product is divided: a program does `depth` tiles of one part of the inner dimension."""

    rows: int
    parts: int
    depth: int
    stages: int


def serves(weights: list[Tensor]) -> bool:
    """Whether the kernel can multiply by all of `weights`, ``[outs, ins]`` each."""
    return all(
        weight.device.type == "cuda"
        and torch.cuda.get_device_capability(weight.device) == HOPPER
        and weight.dtype in (torch.bfloat16, torch.float16)
        and weight.is_contiguous()
        and weight.data_ptr() % 16 == 0
        and weight.shape[1] % 8 == 0
        for weight in weights
    )


def tiling(rows: int, outs: int, ins: int, *, gated: bool = False, split: bool = True) -> Tiling:
    """The division of ``[rows, ins] @ [outs, ins].T``, of nothing but these sizes."""
    assert 1 <= rows <= ROW_MAX, rows
    tile_rows = max(16, triton.next_power_of_2(rows))
    tiles = triton.cdiv(ins, TILE_INS)
    parts = triton.cdiv(PROGRAMS, triton.cdiv(outs, TILE_OUTS)) if split else 1
    depth = triton.cdiv(tiles, min(parts, tiles))
    stages = (GATED_STAGES if gated else STAGES)[tile_rows]
    return Tiling(tile_rows, triton.cdiv(tiles, depth), depth, stages)


def partial_sums(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x @ weight.T + bias`` as parts to be added, float32 ``[parts, rows, outs]``.

    Args:
        x: ``[rows, ins]``, at most ROW_MAX rows.
        weight: ``[outs, ins]``, one that the kernel serves.
        bias: ``[outs]``.
    """
    rows, outs = x.shape[0], weight.shape[0]
    chosen = tiling(rows, outs, weight.shape[1])
    out = torch.empty(chosen.parts, rows, outs, dtype=torch.float32, device=x.device)
    _launch(x, weight, bias, out, outs, chosen, gated=False)
    return out


def product(x: Tensor, weight: Tensor, out: Tensor) -> None:
    """Writes ``x @ weight.T``, ``[rows, outs]``, rounded to the dtype of `out`, into `out`."""
    outs = weight.shape[0]
    assert out.is_contiguous(), out.stride()
    chosen = tiling(x.shape[0], outs, weight.shape[1], split=False)
    _launch(x, weight, None, out, outs, chosen, gated=False)


def gated_product(x: Tensor, gate_up: Tensor) -> Tensor:
    """``silu(x @ gate.T) * (x @ up.T)``, ``[rows, width]``.

    Args:
        x: ``[rows, ins]``, at most ROW_MAX rows.
        gate_up: both weights, ``[2 * width, ins]``.
    """
    rows, width = x.shape[0], gate_up.shape[0] // 2
    chosen = tiling(rows, width, gate_up.shape[1], gated=True, split=False)
    out = torch.empty(rows, width, dtype=x.dtype, device=x.device)
    _launch(x, gate_up, None, out, width, chosen, gated=True)
    return out


def _launch(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor,
    outs: int,
    chosen: Tiling,
    *,
    gated: bool,
) -> None:
    rows, ins = x.shape
    assert x.is_contiguous(), x.stride()
    grid = (triton.cdiv(outs, TILE_OUTS), chosen.parts)
    _streamed_linear[grid](
        _tiles(weight, TILE_OUTS),
        _tiles(x, chosen.rows),
        out if bias is None else bias,
        out,
        rows,
        outs,
        triton.cdiv(ins, TILE_INS),
        chosen.depth,
        TILE_OUTS,
        chosen.rows,
        TILE_INS,
        chosen.stages,
        gated,
        bias is not None,
        num_warps=4,
        launch_pdl=True,
    )


def _tiles(matrix: Tensor, tile_rows: int) -> Any:
    """What the copy engine needs to know of `matrix`; what lies outside reads as zero."""
    dtype = gl.bfloat16 if matrix.dtype == torch.bfloat16 else gl.float16
    block = [tile_rows, TILE_INS]
    layout = gl.NVMMASharedLayout.get_default_for(block, dtype)
    return TensorDescriptor(matrix, list(matrix.shape), list(matrix.stride()), block, layout)


@gluon.jit
def _fetch_weights(
    weight, outs, place, tiles, stage, barrier, used, BYTES: gl.constexpr, GATED: gl.constexpr
):
    """Asks for a stage's weights; `barrier` will see `BYTES` arrive, those of `x` among them."""
    COPIES: gl.constexpr = 2 if GATED else 1
    mbarrier.expect(barrier, BYTES, pred=used)
    _fetch(weight, place, barrier, tiles.index(stage * COPIES), pred=used)
    if GATED:
        up_place = [place[0] + outs, place[1]]
        _fetch(weight, up_place, barrier, tiles.index(stage * COPIES + 1), pred=used)


@gluon.jit
def _store(total, bias, out, first_out, part, rows, outs, HAS_BIAS: gl.constexpr):
    """Writes a tile, ``[TILE_OUTS, TILE_ROWS]``, to ``out[part]``, ``[rows, outs]``."""
    TILE_OUTS: gl.constexpr = total.shape[0]
    TILE_ROWS: gl.constexpr = total.shape[1]
    wide: gl.constexpr = gl.BlockedLayout([4, 1], [16, 2], [1, 4], [0, 1])
    out_places = first_out + gl.arange(0, TILE_OUTS, gl.SliceLayout(1, wide))
    row_places = gl.arange(0, TILE_ROWS, gl.SliceLayout(0, wide))
    result = gl.convert_layout(total, wide)
    if HAS_BIAS:
        if part == 0:
            added = gl.load(bias + out_places, mask=out_places < outs, other=0.0)
            result += added.to(gl.float32)[:, None]
    gl.store(
        out + (part.to(gl.int64) * rows + row_places[None, :]) * outs + out_places[:, None],
        result.to(out.dtype.element_ty),
        mask=(row_places[None, :] < rows) & (out_places[:, None] < outs),
    )


@gluon.jit
def _sums(
    weight,
    x,
    w_tiles,
    x_tiles,
    arrived,
    first_out,
    first,
    count,
    outs,
    STAGES: gl.constexpr,
    GATED: gl.constexpr,
):
    """The program's tile of the product, ``[TILE_OUTS, TILE_ROWS]``, and that of the second half.

    The first stages are on their way; each that has been read is filled again.
    """
    COPIES: gl.constexpr = 2 if GATED else 1
    TILE_OUTS: gl.constexpr = w_tiles.shape[1]
    TILE_ROWS: gl.constexpr = x_tiles.shape[1]
    TILE_INS: gl.constexpr = x_tiles.shape[2]
    BYTES: gl.constexpr = (COPIES * TILE_OUTS + TILE_ROWS) * TILE_INS * 2
    # Transposed, so that the weights' side is the long one of the matrix instruction.
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE_ROWS, 16])
    total = gl.zeros([TILE_OUTS, TILE_ROWS], gl.float32, layout)
    total_up = gl.zeros([TILE_OUTS, TILE_ROWS], gl.float32, layout)
    stage = 0
    phase = 0
    for done in range(count):
        barrier = arrived.index(stage)
        mbarrier.wait(barrier, phase)
        right = x_tiles.index(stage).permute((1, 0))
        total = warpgroup_mma(w_tiles.index(stage * COPIES), right, total, is_async=True)
        if GATED:
            up = w_tiles.index(stage * COPIES + 1)
            total_up = warpgroup_mma(up, right, total_up, is_async=True)
        total, total_up = warpgroup_mma_wait(0, deps=[total, total_up])
        _meet()  # all warps have read the stage
        if done == gl.maximum(count - STAGES, 0):
            gdc_launch_dependents()  # the last weights are on their way
        again = done + STAGES < count
        ins = (first + done + STAGES) * TILE_INS
        _fetch_weights(weight, outs, [first_out, ins], w_tiles, stage, barrier, again, BYTES, GATED)
        _fetch(x, [0, ins], barrier, x_tiles.index(stage), pred=again)
        stage += 1
        if stage == STAGES:
            stage = 0
            phase ^= 1

    return total, total_up


@gluon.jit(do_not_specialize=["rows", "outs", "tiles", "depth"])
def _streamed_linear(
    weight,
    x,
    bias,
    out,
    rows,
    outs,
    tiles,
    depth,
    TILE_OUTS: gl.constexpr,
    TILE_ROWS: gl.constexpr,
    TILE_INS: gl.constexpr,
    STAGES: gl.constexpr,
    GATED: gl.constexpr,
    HAS_BIAS: gl.constexpr,
):
    dtype: gl.constexpr = weight.dtype
    COPIES: gl.constexpr = 2 if GATED else 1
    BYTES: gl.constexpr = (COPIES * TILE_OUTS + TILE_ROWS) * TILE_INS * 2
    first_out = gl.program_id(0) * TILE_OUTS
    part = gl.program_id(1)
    first = part * depth
    count = gl.minimum(depth, tiles - first)
    w_shape: gl.constexpr = [STAGES * COPIES, TILE_OUTS, TILE_INS]
    w_tiles = gl.allocate_shared_memory(dtype, w_shape, weight.layout)
    x_tiles = gl.allocate_shared_memory(dtype, [STAGES, TILE_ROWS, TILE_INS], x.layout)
    arrived = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(arrived.index(s), count=1)
    fence_async_shared()

    # Weights depend on no kernel before this one: fetch them while it still runs.
    for s in gl.static_range(STAGES):
        place = [first_out, (first + s) * TILE_INS]
        _fetch_weights(weight, outs, place, w_tiles, s, arrived.index(s), s < count, BYTES, GATED)
    gdc_wait()
    for s in gl.static_range(STAGES):
        place = [0, (first + s) * TILE_INS]
        _fetch(x, place, arrived.index(s), x_tiles.index(s), pred=s < count)

    total, total_up = _sums(
        weight, x, w_tiles, x_tiles, arrived, first_out, first, count, outs, STAGES, GATED
    )
    if GATED:
        gate = total.to(dtype).to(gl.float32)
        active = (gate / (1.0 + gl.exp(-gate))).to(dtype).to(gl.float32)
        total = active * total_up.to(dtype).to(gl.float32)
    _store(total, bias, out, first_out, part, rows, outs, HAS_BIAS)
