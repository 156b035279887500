"""A decoder of the Llama kind as few kernels: fused projections over the same weights.

Owns the way from token ids to logits for models whose layers are what `recognise` expects: RMSNorm,
rotary attention with grouped heads (with or without biases and query/key norms), SwiGLU. The
weights are views on the model's own, side by side in their arena, so fusing costs no memory. A
model that is not recognised runs through transformers' own layers instead, and the log says so.
Called by the CUDA step.
"""

from __future__ import annotations

import dataclasses
import importlib
import logging
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.functional import embedding, linear
from transformers import PreTrainedModel

from gapless.executor import kernels

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


@dataclasses.dataclass(frozen=True, slots=True)
class _Layer:
    input_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    query_key_norms: tuple[Tensor, Tensor] | None
    output: Tensor
    output_bias: Tensor | None
    middle_norm: Tensor
    gate_up: Tensor
    down: Tensor
    scaling: float
    window: int | None

    @property
    def weights(self) -> tuple[Tensor, ...]:
        return self.qkv, self.output, self.gate_up, self.down


class FusedDecoder:
    """See `recognise`."""

    def __init__(
        self,
        embedding_weight: Tensor,
        layers: list[_Layer],
        final_norm: Tensor,
        head: Tensor,
        epsilon: float,
        rotary: tuple[Tensor, Tensor],
    ) -> None:
        self._embedding = embedding_weight
        self._layers = layers
        self._final_norm = final_norm
        self._head = head
        self._epsilon = epsilon
        self._rotary = rotary
        weights = [head, *(weight for layer in layers for weight in layer.weights)]
        self._streamed = _streamed(weights)
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
        epsilon = self._epsilon
        hidden = embedding(token_ids, self._embedding)
        residual = torch.empty_like(hidden)
        for index, layer in enumerate(self._layers):
            normed = kernels.add_rms_norm(
                hidden, residual, layer.input_norm, epsilon, first=index == 0
            )
            query = kernels.rotate_and_store(
                self._linear(normed, layer.qkv, layer.qkv_bias),
                self._rotary,
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
        normed = kernels.add_rms_norm(hidden, residual, self._final_norm, epsilon)
        if out is None:
            out = normed.new_empty(len(normed), len(self._head))
        streamed = self._streaming(normed)
        if streamed is not None:
            streamed.product(normed, self._head, out)
        else:
            torch.mm(normed, self._head.t(), out=out)
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


class _UnlikeError(Exception):
    """The module is not of the kind; the message says where."""


def recognise(module: PreTrainedModel, context_length: int) -> FusedDecoder | str:
    """The fused form of `module`, or why it has none."""
    try:
        return _fused(module, context_length)
    except _UnlikeError as error:
        return str(error)
    except AttributeError as error:
        return f"no {error.name}"


def _fused(module: PreTrainedModel, context_length: int) -> FusedDecoder:
    decoder: Any = module.model
    config = module.config.get_text_config()
    _need(getattr(config, "hidden_act", None) == "silu", "another activation than silu")
    for scale in ("embedding_multiplier", "residual_multiplier", "logits_scaling"):
        _need(getattr(config, scale, 1.0) == 1.0, f"a {scale}")
    _need(not getattr(config, "final_logit_softcapping", None), "capped logits")
    head: Any = module.lm_head
    _need(head.bias is None, "a bias in the head")
    layers = [_layer(layer) for layer in decoder.layers]
    epsilon = {_epsilon(norm) for layer in decoder.layers for norm in _norms(layer)}
    epsilon.add(_epsilon(decoder.norm))
    _need(len(epsilon) == 1, "norms of different epsilon")
    return FusedDecoder(
        _weight(decoder.embed_tokens),
        layers,
        _weight(decoder.norm),
        _weight(head),
        epsilon.pop(),
        _rotary(decoder, context_length),
    )


def _layer(layer: Any) -> _Layer:
    attention, mlp = layer.self_attn, layer.mlp
    expected = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
    found = {name for name, _ in layer.named_children()}
    _need(found == expected, f"layers with {sorted(found ^ expected)}")
    parts = {"q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm"}
    others = {name for name, _ in attention.named_children()} - parts
    _need(not others, f"attention with {sorted(others)}")
    for projection in (mlp.gate_proj, mlp.up_proj, mlp.down_proj):
        _need(projection.bias is None, "biases in the MLP")
    norms = None
    if hasattr(attention, "q_norm"):
        norms = (_weight(attention.q_norm), _weight(attention.k_norm))
        _need(norms[0].numel() == attention.head_dim, "norms over all heads at once")
    projections = (attention.q_proj, attention.k_proj, attention.v_proj)
    biases = [projection.bias for projection in projections if projection.bias is not None]
    _need(len(biases) in (0, 3), "a bias for some of q, k and v")
    window = getattr(attention, "sliding_window", None)
    return _Layer(
        input_norm=_weight(layer.input_layernorm),
        qkv=side_by_side([_weight(projection) for projection in projections]),
        qkv_bias=torch.cat(biases) if biases else None,
        query_key_norms=norms,
        output=_weight(attention.o_proj),
        output_bias=attention.o_proj.bias,
        middle_norm=_weight(layer.post_attention_layernorm),
        gate_up=side_by_side([_weight(mlp.gate_proj), _weight(mlp.up_proj)]),
        down=_weight(mlp.down_proj),
        scaling=float(attention.scaling),
        window=window if isinstance(window, int) else None,
    )


def side_by_side(weights: list[Tensor]) -> Tensor:
    """The weights ``[out, in]`` as one, ``[sum of outs, in]``: a view if they stand in a row."""
    first = weights[0]
    place = first.storage_offset()
    for weight in weights:
        if (
            weight.untyped_storage().data_ptr() != first.untyped_storage().data_ptr()
            or weight.storage_offset() != place
            or not weight.is_contiguous()
        ):
            return torch.cat(weights)
        place += weight.numel()
    rows = sum(weight.shape[0] for weight in weights)
    return first.as_strided((rows, first.shape[1]), first.stride())


def _rotary(decoder: Any, context_length: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines of all positions, float32 ``[context_length, dim]``."""
    device = decoder.embed_tokens.weight.device
    positions = torch.arange(context_length, device=device)[None]
    cosines, sines = decoder.rotary_emb(torch.zeros(1, device=device), positions)
    return cosines[0].float().contiguous(), sines[0].float().contiguous()


def _norms(layer: Any) -> list[Any]:
    norms: list[Any] = [layer.input_layernorm, layer.post_attention_layernorm]
    if hasattr(layer.self_attn, "q_norm"):
        norms += [layer.self_attn.q_norm, layer.self_attn.k_norm]
    return norms


def _epsilon(norm: Any) -> float:
    return float(norm.variance_epsilon)


def _weight(module: Any) -> Tensor:
    weight = module.weight
    assert isinstance(weight, Tensor)
    return weight.detach()


def _need(holds: bool, otherwise: str) -> None:
    if not holds:
        raise _UnlikeError(otherwise)
