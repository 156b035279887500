"""What a fused decoder needs of a model: the weights of layers of the Llama kind, or why not.

Owns the recognition of such models: RMSNorm, rotary attention with grouped heads (with or without
biases and query/key norms), SwiGLU, and nothing else. The weights are views on the model's own,
side by side in their arena, so that taking them costs no memory. Knows nothing of devices and of
how the decoders compute. Called by `fused` and `cpu_start`.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from gapless.executor.probe import attention_calls


@dataclasses.dataclass(frozen=True, slots=True)
class Layer:
    """One layer; weights of products are ``[out, in]``."""

    input_norm: Tensor
    qkv: Tensor
    """Those of queries, keys and values, one below the other, as are those of gate and up."""
    qkv_bias: Tensor | None
    query_key_norms: tuple[Tensor, Tensor] | None
    output: Tensor
    output_bias: Tensor | None
    middle_norm: Tensor
    gate_up: Tensor
    down: Tensor
    kv_heads: int
    scaling: float
    window: int | None

    @property
    def weights(self) -> tuple[Tensor, ...]:
        return self.qkv, self.output, self.gate_up, self.down


@dataclasses.dataclass(frozen=True, slots=True)
class DecoderWeights:
    """A whole decoder, from token ids to logits."""

    embedding: Tensor
    layers: tuple[Layer, ...]
    final_norm: Tensor
    head: Tensor
    epsilon: float
    """Of all norms."""
    rotary: tuple[Tensor, Tensor]
    """Cosines and sines of all positions, float32 ``[context_length, dim]``."""

    @property
    def of_products(self) -> list[Tensor]:
        """The weights of all products."""
        return [self.head, *(weight for layer in self.layers for weight in layer.weights)]


class _UnlikeError(Exception):
    """The module is not of the kind; the message says where."""


def decoder_weights(module: PreTrainedModel, context_length: int) -> DecoderWeights | str:
    """The weights of `module` if it is of the kind, else what it has that others have not.

    Paged attention has been plugged into `module`.
    """
    try:
        return _taken(module, context_length)
    except _UnlikeError as error:
        return str(error)
    except AttributeError as error:
        return f"no {error.name}"


def _taken(module: PreTrainedModel, context_length: int) -> DecoderWeights:
    decoder: Any = module.model
    config = module.config.get_text_config()
    _need(getattr(config, "hidden_act", None) == "silu", "another activation than silu")
    for scale in ("embedding_multiplier", "residual_multiplier", "logits_scaling"):
        _need(getattr(config, scale, 1.0) == 1.0, f"a {scale}")
    _need(not getattr(config, "final_logit_softcapping", None), "capped logits")
    head: Any = module.lm_head
    _need(head.bias is None, "a bias in the head")
    # Not every attention that has a window has an attribute for it: what it asks for counts.
    calls = attention_calls(module, len(decoder.layers))
    layers = tuple(
        _layer(layer, call.window) for layer, call in zip(decoder.layers, calls, strict=True)
    )
    epsilon = {_epsilon(norm) for layer in decoder.layers for norm in _norms(layer)}
    epsilon.add(_epsilon(decoder.norm))
    _need(len(epsilon) == 1, "norms of different epsilon")
    rotary = _rotary(decoder, context_length)
    head_dim = decoder.layers[0].self_attn.head_dim
    _need(rotary[0].shape[1] == head_dim, "rotary embeddings of a part of each head")
    return DecoderWeights(
        embedding=_weight(decoder.embed_tokens),
        layers=layers,
        final_norm=_weight(decoder.norm),
        head=_weight(head),
        epsilon=epsilon.pop(),
        rotary=rotary,
    )


def _layer(layer: Any, window: int | None) -> Layer:
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
    return Layer(
        input_norm=_weight(layer.input_layernorm),
        qkv=side_by_side([_weight(projection) for projection in projections]),
        qkv_bias=torch.cat(biases) if biases else None,
        query_key_norms=norms,
        output=_weight(attention.o_proj),
        output_bias=attention.o_proj.bias,
        middle_norm=_weight(layer.post_attention_layernorm),
        gate_up=side_by_side([_weight(mlp.gate_proj), _weight(mlp.up_proj)]),
        down=_weight(mlp.down_proj),
        kv_heads=_weight(attention.k_proj).shape[0] // attention.head_dim,
        scaling=float(attention.scaling),
        window=window,
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
