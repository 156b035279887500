"""A decoder of the Llama kind on a CPU: few calls a layer, weights in the layout of their products.

Owns the way from token ids to logits there, for models whose layers are what `decoder_weights`
expects; others run through transformers' own layers. At batch 1 a quarter of a step of a small
model is the calls between the products, so there are few. Called by the step; made and checked by
`cpu_start`.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor
from torch.nn.functional import embedding, layer_norm, silu

from gapless.executor.attention import StepAttention
from gapless.executor.cpu_products import PackedProduct, PlainProduct, Product
from gapless.executor.decoder_weights import DecoderWeights, Layer


class RmsNorm:
    """RMSNorm in three calls, where torch's own makes ten.

    It is the layer norm of x beside -x: their mean is zero, their variance the mean square of x.
    """

    def __init__(self, weight: Tensor, epsilon: float) -> None:
        self._weight = torch.cat([weight, weight])
        self._epsilon = epsilon

    def of(self, x: Tensor) -> Tensor:
        """``[..., dim]`` to the same; rounded once."""
        both = torch.cat([x, -x], dim=-1)
        normed = layer_norm(both, self._weight.shape, self._weight, None, self._epsilon)
        return normed[..., : x.shape[-1]]


@dataclasses.dataclass(frozen=True, slots=True)
class _Parts:
    """The products and norms of a layer."""

    input_norm: RmsNorm
    qkv: Product
    query_key_norms: tuple[RmsNorm, RmsNorm] | None
    output: Product
    middle_norm: RmsNorm
    gate_up: Product
    down: Product


class CpuDecoder:
    """Computes the same as the model from which its weights are."""

    def __init__(self, weights: DecoderWeights, *, is_packed: bool) -> None:
        """Packed: the weights of products are copied into the layout that suits them."""
        product = PackedProduct if is_packed else PlainProduct
        self._weights = weights
        self._head: Product = product(weights.head)
        self._final_norm = RmsNorm(weights.final_norm, weights.epsilon)
        self._parts = [_parts(layer, product, weights.epsilon) for layer in weights.layers]
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
        for index, (layer, parts) in enumerate(zip(weights.layers, self._parts, strict=True)):
            heads = parts.qkv.of(parts.input_norm.of(hidden)).view(len(hidden), -1, self._dim)
            query, key, value = self._rotated(heads, layer.kv_heads, parts.query_key_norms, turn)
            attended = attention.attend(index, query, key, value, layer.scaling, layer.window)
            hidden = parts.output.plus(attended.flatten(1), hidden)
            gate, up = parts.gate_up.of(parts.middle_norm.of(hidden)).chunk(2, dim=-1)
            hidden = parts.down.plus(silu(gate).mul_(up), hidden)
        if last_tokens is not None:
            hidden = hidden.index_select(0, last_tokens)
        return self._head.of(self._final_norm.of(hidden))

    def _rotated(
        self,
        heads: Tensor,
        kv_heads: int,
        norms: tuple[RmsNorm, RmsNorm] | None,
        turn: tuple[Tensor, Tensor],
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of ``[tokens, heads + 2 * kv_heads, dim]``.

        The other half of a head stands where a roll by half of it brings it; its sign is the
        sines'.
        """
        query_count = heads.shape[1] - 2 * kv_heads
        turned, value = torch.split(heads, [query_count + kv_heads, kv_heads], dim=1)
        if norms is not None:
            parts = torch.split(turned, [query_count, kv_heads], dim=1)
            normed = [norm.of(part) for norm, part in zip(norms, parts, strict=True)]
            turned = torch.cat(normed, dim=1)
        cosines, signed_sines = turn
        partners = turned.roll(self._dim // 2, dims=-1)
        rotated = torch.addcmul(turned * cosines, partners, signed_sines)
        query, key = torch.split(rotated, [query_count, kv_heads], dim=1)
        return query, key, value


def _parts(
    layer: Layer, product: type[PackedProduct] | type[PlainProduct], epsilon: float
) -> _Parts:
    norms = layer.query_key_norms
    return _Parts(
        input_norm=RmsNorm(layer.input_norm, epsilon),
        qkv=product(layer.qkv, layer.qkv_bias),
        query_key_norms=norms and (RmsNorm(norms[0], epsilon), RmsNorm(norms[1], epsilon)),
        output=product(layer.output, layer.output_bias),
        middle_norm=RmsNorm(layer.middle_norm, epsilon),
        gate_up=product(layer.gate_up),
        down=product(layer.down),
    )
