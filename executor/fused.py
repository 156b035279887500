"""A decoder of the Llama kind as few kernels: fused projections over the same weights.

Owns the way from token ids to logits on a GPU for models whose layers are what `decoder_weights`
expects. A model that is not recognised runs through transformers' own layers instead, and the log
says so. Called by the CUDA step.
"""

from __future__ import annotations

import importlib
import logging
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.functional import embedding, linear
from transformers import PreTrainedModel

from gapless.executor import kernels
from gapless.executor.decoder_weights import DecoderWeights, decoder_weights

log = logging.getLogger(__name__)


class StreamedLinears(Protocol):
    """The module `streamed_linear`, which is there where triton has what it needs."""

    ROW_MAX: int

    def partial_sums(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor: ...

    def gated_product(self, x: Tensor, gate_up: Tensor) -> Tensor: ...

    def product(self, x: Tensor, weight: Tensor, out: Tensor) -> None: ...


class StoredAttention(Protocol):
    """Attention whose keys and values are already in the pool."""

    @property
    def write_slots(self) -> Tensor:
        """int64 ``[tokens]``: where each token's key and value go."""

    def pool(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values of a layer, ``[places, kv_heads, dim]``."""

    def read(self, layer: int, query: Tensor, scaling: float, window: int | None) -> Tensor:
        """``[tokens, heads, dim]`` to the same."""


class FusedDecoder:
    """See `recognise`."""

    def __init__(self, weights: DecoderWeights) -> None:
        self._weights = weights
        self._streamed = _streamed(weights.of_products)
        self._streamed_row_max = 0 if self._streamed is None else self._streamed.ROW_MAX

    def logits(
        self,
        token_ids: Tensor,
        positions: Tensor,
        last_tokens: Tensor | None,
        attention: StoredAttention,
        out: Tensor | None = None,
    ) -> Tensor:
        """Logits ``[rows, vocab_size]`` behind `last_tokens` (all tokens if None).

        Args:
            token_ids: ``[tokens]``, as are the positions.
            positions: of the tokens in their sequences.
            last_tokens: indices among the tokens.
            attention: of the step.
            out: receives and is the result, if given; contiguous.
        """
        weights, epsilon = self._weights, self._weights.epsilon
        hidden = embedding(token_ids, weights.embedding)
        residual = torch.empty_like(hidden)
        for index, layer in enumerate(weights.layers):
            normed = kernels.add_rms_norm(
                hidden, residual, layer.input_norm, epsilon, first=index == 0
            )
            query = kernels.rotate_and_store(
                self._linear(normed, layer.qkv, layer.qkv_bias),
                weights.rotary,
                positions,
                attention.write_slots,
                layer.query_key_norms,
                epsilon,
                attention.pool(index),
            )
            attended = attention.read(index, query, layer.scaling, layer.window).flatten(1)
            hidden = self._linear(attended, layer.output, layer.output_bias)
            normed = kernels.add_rms_norm(hidden, residual, layer.middle_norm, epsilon)
            hidden = self._linear(self._gated(normed, layer.gate_up), layer.down)
        if last_tokens is not None:
            hidden = hidden.index_select(-2, last_tokens)
            residual = residual.index_select(0, last_tokens)
        normed = kernels.add_rms_norm(hidden, residual, weights.final_norm, epsilon)
        if out is None:
            out = normed.new_empty(len(normed), len(weights.head))
        streamed = self._streaming(normed)
        if streamed is not None:
            streamed.product(normed, weights.head, out)
        else:
            torch.mm(normed, weights.head.t(), out=out)
        return out

    def _linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """``x @ weight.T + bias``, or its partial sums: the next kernel takes either."""
        streamed = self._streaming(x)
        if streamed is not None:
            return streamed.partial_sums(x, weight, bias)
        return linear(x, weight, bias)

    def _gated(self, x: Tensor, gate_up: Tensor) -> Tensor:
        streamed = self._streaming(x)
        if streamed is not None:
            return streamed.gated_product(x, gate_up)
        return kernels.silu_and_multiply(linear(x, gate_up))

    def _streaming(self, x: Tensor) -> StreamedLinears | None:
        """The kernel for products of `x`, if it has few rows."""
        return self._streamed if len(x) <= self._streamed_row_max else None


def _streamed(weights: list[Tensor]) -> StreamedLinears | None:
    """The kernel for products of few rows, where it serves all `weights`."""
    try:
        module: Any = importlib.import_module("gapless.executor.streamed_linear")
    except ImportError as error:  # an older triton, or a later one with other names
        log.warning("products of few rows by the library's kernels: %s", error)
        return None
    return module if module.serves(weights) else None


def recognise(module: PreTrainedModel, context_length: int) -> FusedDecoder | str:
    """The fused form of `module`, or why it has none."""
    weights = decoder_weights(module, context_length)
    if isinstance(weights, str):
        return weights
    head_dim = weights.rotary[0].shape[1]
    if head_dim & (head_dim - 1):
        return f"heads of {head_dim}, which is no power of two"  # triton's blocks are
    return FusedDecoder(weights)
