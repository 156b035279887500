"""From a loaded model to a CUDA device that is ready for steps: fused form, backend, graphs.

Owns the choices made at start, which the log names. Called by loading, on a CUDA device only.
"""

from __future__ import annotations

import logging
import os

import torch

from gapless.executor.attention_backends import (
    VARLEN,
    available_backends,
    make_attention,
    torch_has_paged_varlen,
)
from gapless.executor.config import UserError
from gapless.executor.cuda_attention import CudaAttention, HeadShape
from gapless.executor.cuda_device import CudaDevice
from gapless.executor.cuda_step import CudaStep
from gapless.executor.device import Device, Regions
from gapless.executor.flash_attention import VARLEN_PAGE_TOKENS
from gapless.executor.flashinfer_attention import workspace_bytes
from gapless.executor.fused import FusedDecoder, recognise
from gapless.executor.fused_probe import checked
from gapless.executor.kv import KvPool, KvShape
from gapless.executor.model import Model
from gapless.executor.phases import Phases
from gapless.executor.seats import SeatCopy
from gapless.protos.messages import Attach

POOL_SHARE = 0.9
"""Share of the memory that is free once the weights stand which the KV pool takes, unless told."""
RESERVED_BYTES = 3 << 30
"""Left for graphs, workspaces and the steps' own tensors."""

log = logging.getLogger(__name__)


def cuda_block_count(shape: KvShape, context_length: int, row_max: int) -> int:
    """Blocks of the pool on the current GPU; never more than `row_max` whole contexts can use."""
    free_bytes, _ = torch.cuda.mem_get_info()
    fitting = int(max(free_bytes - RESERVED_BYTES, 0) * POOL_SHARE) // shape.block_bytes
    context_blocks = -(-context_length // shape.block_tokens)
    return max(2, min(fitting, 1 + context_blocks * row_max))


def start(
    model: Model,
    pool: KvPool,
    seats: SeatCopy,
    attach: Attach,
    regions: Regions,
    wanted: str,
    phases: Phases,
) -> Device:
    """The device of an epoch, its graphs captured.

    Raises:
        UserError: the attention that was asked for is not there, or does not serve the model.
    """
    config = model.module.config.get_text_config()
    heads = HeadShape(
        heads=config.num_attention_heads,
        kv_heads=model.shape.kv_head_count,
        dim=model.shape.head_dim,
        dtype=model.shape.dtype,
    )
    windows = getattr(config, "sliding_window", None) is not None
    backend = _backend(heads, windows, pool.block_tokens, wanted)
    fused = fused_form(model, heads, pool.block_tokens, backend)
    phases.end("kernels")
    step = CudaStep(model, fused, pool, seats, heads, regions.frames.layout, backend)
    device = CudaDevice(attach.epoch, regions, step, len(os.sched_getaffinity(0)))
    phases.end("graphs")
    log.info("attention: %s", backend)
    return device


def fused_form(
    model: Model, heads: HeadShape, block_tokens: int, backend: str
) -> FusedDecoder | None:
    """The fused decoder of `model`, if it has one that computes the same; the log says why not."""
    found = recognise(model.module, model.shape.context_length)
    if not isinstance(found, FusedDecoder):
        log.warning("%s runs unfused: %s", model.shape.architecture, found)
        return None
    device = model.module.device
    multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
    scratch_bytes = workspace_bytes(heads, multiprocessors, ())
    workspace = torch.empty(scratch_bytes, dtype=torch.uint8, device=device)

    def attention(pool: KvPool, row_count: int, token_count: int) -> CudaAttention:
        return make_attention(
            backend, pool, heads, workspace, row_count, token_count, captured=False
        )

    return checked(found, model, block_tokens, attention)


def _backend(heads: HeadShape, windows: bool, block_tokens: int, wanted: str) -> str:
    available = available_backends(heads, windows=windows, block_tokens=block_tokens)
    if wanted == "auto":
        return available[0]
    if wanted not in available:
        hint = ""
        if wanted == VARLEN and torch_has_paged_varlen():
            hint = f" (it wants --block-tokens {VARLEN_PAGE_TOKENS}, or a multiple)"
        raise UserError(
            f"--attention {wanted}: available for this model: {', '.join(available)}{hint}"
        )
    return wanted
