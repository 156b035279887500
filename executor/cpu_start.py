"""From a loaded model to what computes its steps on a CPU: the fused form, if there is one.

Owns the choices made at start, which the log names. Called by loading, on a CPU only; see
`cuda_start` for the other device.
"""

from __future__ import annotations

import logging
from typing import Final

from gapless.executor.cpu_decoder import CpuDecoder
from gapless.executor.cpu_products import can_pack
from gapless.executor.cuda_attention import Gathered
from gapless.executor.decoder_weights import DecoderWeights, decoder_weights
from gapless.executor.fused_probe import checked
from gapless.executor.kv import KvPool, available_memory_bytes
from gapless.executor.model import Model
from gapless.executor.step import Decoder

PACKED_MEMORY_SHARE: Final = 0.5
"""Share of the memory available once the weights stand that their packed copies may take."""

log = logging.getLogger(__name__)


def cpu_decoder(model: Model, block_tokens: int) -> Decoder:
    """What computes the model's steps: a fused form that proved itself, else the model."""
    weights = decoder_weights(model.module, model.shape.context_length)
    if isinstance(weights, str):
        log.warning("%s runs unfused: %s", model.shape.architecture, weights)
        return model
    fused = CpuDecoder(weights, is_packed=_is_worth_packing(model, weights))
    return checked(fused, model, block_tokens, _attention) or model


def _attention(pool: KvPool, row_count: int, token_count: int) -> Gathered:
    """Of the check, in which rows are few."""
    return Gathered(pool)


def _is_worth_packing(model: Model, weights: DecoderWeights) -> bool:
    if not can_pack(model.shape.dtype):
        return False
    size_bytes = sum(weight.nbytes for weight in weights.of_products)
    available_bytes = available_memory_bytes()
    if size_bytes > PACKED_MEMORY_SHARE * available_bytes:
        log.warning(
            "weights are not packed, which would make small batches faster: that takes %.0f MiB, "
            "available are %.0f MiB",
            size_bytes / 2**20,
            available_bytes / 2**20,
        )
        return False
    return True
