"""The small kernels between the matrix products, in Triton: norms, rotary, SwiGLU, time stamps.

Owns nothing but the kernels; each has a plain torch form in transformers, against which the
tests compare it. Called by `fused` and by the step, on a CUDA device only.

Values are rounded to the model's dtype where transformers' modules round them, and computed in
float32 in between.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import cuda as tl_cuda

FEW_TOKENS: Final = 64
"""Up to so many, one head a program: what counts then is how soon the last one is done."""
HEADS_A_PROGRAM: Final = 8


def overlaps(device: torch.device) -> bool:
    """Whether a kernel may start while the one before it ends (programmatic dependent launch)."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def _part_count(x: Tensor) -> int:
    return x.shape[0] if x.dim() == 3 else 1


@triton.jit
def _total(parts, place, distance, PARTS: tl.constexpr, inside):
    """The sum of `PARTS` partial results, `distance` apart; float32."""
    total = tl.load(parts + place, mask=inside, other=0.0).to(tl.float32)
    for part in tl.static_range(1, PARTS):
        total += tl.load(parts + part * distance + place, mask=inside, other=0.0)
    return total


@triton.jit
def _add_rms_norm(
    x,
    residual,
    weight,
    out,
    width,
    distance,
    epsilon,
    PARTS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    if OVERLAP:
        tl_cuda.gdc_launch_dependents()
        tl_cuda.gdc_wait()
    total = _total(x, row * width + columns, distance, PARTS, inside)
    values = total.to(out.dtype.element_ty)
    if HAS_RESIDUAL:
        values += tl.load(residual + row * width + columns, mask=inside, other=0.0)
    tl.store(residual + row * width + columns, values, mask=inside)
    exact = values.to(tl.float32)
    scale = tl.rsqrt(tl.sum(exact * exact, axis=0) / width + epsilon)
    normed = (exact * scale).to(values.dtype)
    gain = tl.load(weight + columns, mask=inside, other=0.0)
    tl.store(out + row * width + columns, normed * gain, mask=inside)


def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    epsilon: float,
    *,
    first: bool = False,
) -> Tensor:
    """RMSNorm of ``x + residual``, ``[tokens, width]``; the sum replaces `residual` in place.

    With `first` there is nothing to add: `residual` becomes a copy of `x`. `x` may be the partial
    sums of a product, float32 ``[parts, tokens, width]``.
    """
    out = torch.empty_like(residual)
    tokens, width = residual.shape
    block = triton.next_power_of_2(width)
    overlap = overlaps(x.device)
    _add_rms_norm[(tokens,)](
        x,
        residual,
        weight,
        out,
        width,
        tokens * width,
        epsilon,
        _part_count(x),
        not first,
        block,
        overlap,
        num_warps=min(max(block // 256, 1), 16),
        launch_pdl=overlap,
    )
    return out


@triton.jit
def _rotate_and_store(
    qkv,
    cosines,
    sines,
    positions,
    write_slots,
    q_weight,
    k_weight,
    q_out,
    keys,
    values,
    distance,
    epsilon,
    PARTS: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    GROUP: tl.constexpr,
    HAS_NORM: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    all_heads: tl.constexpr = HEADS + 2 * KV_HEADS
    half: tl.constexpr = DIM // 2
    token = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * GROUP + tl.arange(0, GROUP))[:, None]
    columns = tl.arange(0, DIM)[None, :]
    partner_columns = (columns + half) % DIM
    inside = (head < all_heads) & (columns < DIM)
    place = (token * all_heads + head) * DIM
    dtype: tl.constexpr = q_out.dtype.element_ty
    if OVERLAP:
        tl_cuda.gdc_launch_dependents()
        tl_cuda.gdc_wait()
    slot = tl.load(write_slots + token)
    value = _total(qkv, place + columns, distance, PARTS, inside).to(dtype)
    is_value = head >= HEADS + KV_HEADS
    place_in_pool = (slot * KV_HEADS + (head - HEADS) % KV_HEADS) * DIM + columns
    tl.store(values + place_in_pool, value, mask=inside & is_value)
    rotates = inside & ~is_value
    x, partner = value, _total(qkv, place + partner_columns, distance, PARTS, rotates).to(dtype)
    if HAS_NORM:
        exact = x.to(tl.float32)
        scale = tl.rsqrt(tl.sum(exact * exact, axis=1) / DIM + epsilon)[:, None]
        is_query = head < HEADS
        gain = tl.where(is_query, tl.load(q_weight + columns), tl.load(k_weight + columns))
        x = (exact * scale).to(dtype) * gain
        gain = tl.where(
            is_query, tl.load(q_weight + partner_columns), tl.load(k_weight + partner_columns)
        )
        partner = (partner.to(tl.float32) * scale).to(dtype) * gain
    angle = tl.load(positions + token).to(tl.int64) * DIM + columns
    sign = tl.where(columns < half, -1.0, 1.0)
    turned = x.to(tl.float32) * tl.load(cosines + angle)
    turned += sign * partner.to(tl.float32) * tl.load(sines + angle)
    tl.store(q_out + (token * HEADS + head) * DIM + columns, turned, mask=inside & (head < HEADS))
    tl.store(keys + place_in_pool, turned, mask=rotates & (head >= HEADS))


def rotate_and_store(
    qkv: Tensor,
    rotary: tuple[Tensor, Tensor],
    positions: Tensor,
    write_slots: Tensor,
    norms: tuple[Tensor, Tensor] | None,
    epsilon: float,
    layer_pool: tuple[Tensor, Tensor],
) -> Tensor:
    """Rotates queries and keys, and writes keys and values to their places in the pool.

    Args:
        qkv: ``[tokens, (heads + 2 * kv_heads) * dim]``, the fused projection; or its partial sums,
            float32 ``[parts, tokens, (heads + 2 * kv_heads) * dim]``.
        rotary: cosines and sines of all positions, float32 ``[positions, dim]``.
        positions: ``[tokens]``.
        write_slots: int64 ``[tokens]``, places in the pool.
        norms: weights ``[dim]`` of the queries' and keys' RMSNorm, for models that have them.
        epsilon: of those norms.
        layer_pool: keys and values of the layer, ``[places, kv_heads, dim]``; written.

    Returns:
        Queries ``[tokens, heads, dim]``.
    """
    assert positions.is_contiguous(), positions.stride()
    assert write_slots.is_contiguous(), write_slots.stride()
    keys, values = layer_pool
    kv_heads, dim = keys.shape[1:]
    tokens, width = qkv.shape[-2:]
    heads = width // dim - 2 * kv_heads
    queries = torch.empty(tokens, heads, dim, dtype=keys.dtype, device=qkv.device)
    q_weight, k_weight = norms if norms is not None else (keys, keys)
    overlap = overlaps(qkv.device)
    group = 1 if tokens <= FEW_TOKENS else HEADS_A_PROGRAM
    _rotate_and_store[(tokens, triton.cdiv(heads + 2 * kv_heads, group))](
        qkv,
        *rotary,
        positions,
        write_slots,
        q_weight,
        k_weight,
        queries,
        keys,
        values,
        tokens * width,
        epsilon,
        _part_count(qkv),
        heads,
        kv_heads,
        dim,
        group,
        norms is not None,
        overlap,
        num_warps=max(group * dim // 256, 1),
        launch_pdl=overlap,
    )
    return queries


@triton.jit
def _silu_and_multiply(gate_up, out, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    gate = tl.load(gate_up + 2 * row * width + columns, mask=inside, other=0.0)
    up = tl.load(gate_up + (2 * row + 1) * width + columns, mask=inside, other=0.0)
    exact = gate.to(tl.float32)
    activated = (exact * tl.sigmoid(exact)).to(gate.dtype)
    tl.store(out + row * width + columns, activated * up, mask=inside)


def silu_and_multiply(gate_up: Tensor) -> Tensor:
    """``silu(gate) * up``, ``[tokens, width]``, of both side by side, ``[tokens, 2 * width]``."""
    token_count, double = gate_up.shape
    width = double // 2
    out = torch.empty(token_count, width, dtype=gate_up.dtype, device=gate_up.device)
    block = 1024
    _silu_and_multiply[(token_count, triton.cdiv(width, block))](gate_up, out, width, block)
    return out


@triton.jit
def _stamp(stamps, index):
    tl.store(stamps + index, tl_cuda.globaltimer())


def stamp(stamps: Tensor, index: int) -> None:
    """Writes the GPU's own timer, in nanoseconds, to ``stamps[index]`` (int64, on the device)."""
    _stamp[(1,)](stamps, index, num_warps=1)
