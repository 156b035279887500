"""Which attention kernels there are for a model on this machine, and the making of one.

Owns the names of the backends and the order of preference. Called at start (the choice) and by the
CUDA step (one object a slot and shape of step).
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from typing import Final

import torch
from torch import Tensor

from gapless.executor.cuda_attention import CudaAttention, Gathered, HeadShape
from gapless.executor.flash_attention import VARLEN_PAGE_TOKENS, FlashAttention3, TorchVarlen
from gapless.executor.flashinfer_attention import FlashInfer
from gapless.executor.kv import KvPool

FLASHINFER: Final = "flashinfer"
FA3: Final = "fa3"
VARLEN: Final = "varlen"
GATHER: Final = "gather"


def available_backends(heads: HeadShape, *, windows: bool, block_tokens: int) -> tuple[str, ...]:
    """Backends that are installed and serve `heads`, best first; the last one serves anything.

    Args:
        heads: the model's.
        windows: some layer has a sliding window.
        block_tokens: the size of the pool's blocks.
    """
    found = []
    if heads.dtype in (torch.bfloat16, torch.float16):
        if heads.dim in (64, 128, 256):
            if not windows and _is_installed("flashinfer"):
                found.append(FLASHINFER)
            if _is_installed("flash_attn_interface"):
                found.append(FA3)
        fits = heads.dim % 8 == 0 and heads.dim <= 256 and block_tokens % VARLEN_PAGE_TOKENS == 0
        if fits and torch_has_paged_varlen():
            found.append(VARLEN)
    return (*found, GATHER)


def torch_has_paged_varlen() -> bool:
    """Whether this torch has `varlen_attn` with a block table, and a GPU that runs it."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 0):
        return False
    if not _is_installed("torch.nn.attention.varlen"):
        return False
    function = importlib.import_module("torch.nn.attention.varlen").varlen_attn
    return {"block_table", "seqused_k"} <= inspect.signature(function).parameters.keys()


def make_attention(
    name: str,
    pool: KvPool,
    heads: HeadShape,
    workspace: Tensor,
    row_count: int,
    token_count: int,
    *,
    captured: bool,
) -> CudaAttention:
    """An attention of backend `name` for steps of that many rows and tokens (at most, if not
    `captured`). `workspace`: FlashInfer's scratch, shared by all."""
    if name == FLASHINFER:
        return FlashInfer(pool, heads, workspace, row_count, token_count, captured=captured)
    if name == FA3:
        return FlashAttention3(pool)
    return TorchVarlen(pool) if name == VARLEN else Gathered(pool)


def _is_installed(name: str) -> bool:
    return importlib.util.find_spec(name) is not None
