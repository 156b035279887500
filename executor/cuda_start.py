"""From a loaded model to a CUDA device that is ready for steps: fused form, backend, graphs.

Owns the choices made at start, which the log names. Called by loading, on a CUDA device only.
"""

from __future__ import annotations

import logging
import time

import torch

from gapless.executor.attention_backends import (
    VARLEN,
    available_backends,
    torch_has_paged_varlen,
)
from gapless.executor.config import UserError
from gapless.executor.cuda_attention import HeadShape
from gapless.executor.cuda_device import CudaDevice
from gapless.executor.cuda_step import CudaStep
from gapless.executor.device import Device, Regions
from gapless.executor.flash_attention import VARLEN_PAGE_TOKENS
from gapless.executor.fused import FusedDecoder, recognise
from gapless.executor.kv import KvPool, KvShape
from gapless.executor.model import Model
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
    model: Model, pool: KvPool, seats: SeatCopy, attach: Attach, regions: Regions, wanted: str
) -> Device:
    """The device of an epoch, its graphs captured.

    Raises:
        UserError: the attention that was asked for is not there, or does not serve the model.
    """
    begin = time.monotonic()
    config = model.module.config.get_text_config()
    heads = HeadShape(
        heads=config.num_attention_heads,
        kv_heads=model.shape.kv_head_count,
        dim=model.shape.head_dim,
        dtype=model.shape.dtype,
    )
    windows = getattr(config, "sliding_window", None) is not None
    backend = _backend(heads, windows, pool.block_tokens, wanted)
    fused = recognise(model.module, model.shape.context_length)
    if not isinstance(fused, FusedDecoder):
        log.warning("%s runs unfused: %s", model.shape.architecture, fused)
    step = CudaStep(
        model,
        fused if isinstance(fused, FusedDecoder) else None,
        pool,
        seats,
        heads,
        regions.frames.layout,
        backend,
    )
    device = CudaDevice(attach.epoch, regions, step, attach.row_max)
    log.info("attention: %s; graphs captured in %.1f s", backend, time.monotonic() - begin)
    return device


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
