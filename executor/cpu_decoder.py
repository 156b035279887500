"""A decoder of the Llama kind on a CPU: few calls a layer, weights in the layout of their products.

Owns the way from token ids to logits there, for models whose layers are what `decoder_weights`
expects; others run through transformers' own layers. At batch 1 half of a step of a small model is
the calls between the products, so what can be part of a product is (see `cpu_products`). Called by
the step; made and checked by `cpu_start`.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor
from torch.nn.functional import embedding, rms_norm

from gapless.executor.attention import StepAttention
from gapless.executor.cpu_products import PackedProduct, PlainProduct, Product
from gapless.executor.decoder_weights import DecoderWeights, Layer


@dataclasses.dataclass(frozen=True, slots=True)
class _Products:
    """The products of a layer."""

    qkv: Product
    output: Product
    gate: Product
    up: Product
    down: Product


class CpuDecoder:
    """Computes the same as the model from which its weights are."""

    def __init__(self, weights: DecoderWeights, *, is_packed: bool) -> None:
        """Packed: the weights of products are copied into the layout that suits them."""
        product = PackedProduct if is_packed else PlainProduct
        self._weights = weights
        self._head: Product = product(weights.head)
        self._products = [_products(layer, product) for layer in weights.layers]
        dtype = weights.embedding.dtype
        cosines, sines = weights.rotary
        self._dim = cosines.shape[1]
        half = torch.arange(self._dim) < self._dim // 2
        self._cosines = cosines.to(dtype)
        self._signed_sines = torch.where(half, -sines, sines).to(dtype)

    def logits(
        self,
        token_ids: Tensor,
        positions: Tensor,
        last_tokens: Tensor | None,
        attention: StepAttention,
    ) -> Tensor:
        """Logits ``[rows, vocab_size]`` behind `last_tokens` (all tokens if None)."""
        weights = self._weights
        hidden = embedding(token_ids, weights.embedding)
        turn = (
            self._cosines.index_select(0, positions)[:, None],
            self._signed_sines.index_select(0, positions)[:, None],
        )
        for index, (layer, products) in enumerate(zip(weights.layers, self._products, strict=True)):
            heads = products.qkv.of(self._normed(hidden, layer.input_norm))
            query, key, value = self._rotated(heads.view(len(heads), -1, self._dim), layer, turn)
            attended = attention.attend(index, query, key, value, layer.scaling, layer.window)
            hidden = products.output.plus(attended.flatten(1), hidden)
            normed = self._normed(hidden, layer.middle_norm)
            gated = products.up.times(normed, products.gate.activated(normed))
            hidden = products.down.plus(gated, hidden)
        if last_tokens is not None:
            hidden = hidden.index_select(0, last_tokens)
        return self._head.of(self._normed(hidden, weights.final_norm))

    def _normed(self, x: Tensor, weight: Tensor) -> Tensor:
        return rms_norm(x, weight.shape, weight, self._weights.epsilon)

    def _rotated(
        self, heads: Tensor, layer: Layer, turn: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of ``[tokens, heads + 2 * kv_heads, dim]``.

        The other half of a head stands where a roll by half of it brings it; its sign is the
        sines'.
        """
        kv_heads = layer.kv_heads
        query_count = heads.shape[1] - 2 * kv_heads
        turned, value = torch.split(heads, [query_count + kv_heads, kv_heads], dim=1)
        if layer.query_key_norms is not None:
            parts = torch.split(turned, [query_count, kv_heads], dim=1)
            normed = map(self._normed, parts, layer.query_key_norms)
            turned = torch.cat(list(normed), dim=1)
        cosines, signed_sines = turn
        partners = turned.roll(self._dim // 2, dims=-1)
        rotated = torch.addcmul(turned * cosines, partners, signed_sines)
        query, key = torch.split(rotated, [query_count, kv_heads], dim=1)
        return query, key, value


def _products(layer: Layer, product: type[PackedProduct] | type[PlainProduct]) -> _Products:
    gate, up = layer.gate_up.chunk(2)
    return _Products(
        qkv=product(layer.qkv, layer.qkv_bias),
        output=product(layer.output, layer.output_bias),
        gate=product(gate),
        up=product(up),
        down=product(layer.down),
    )
