"""Checks at load: a few tokens through a model, with transformers' attention and with ours.

Owns the proof that a model computes the same with the paged attention as without. Knows nothing
of seats or steps. Called by the model's loading, before anything is served.
"""

from __future__ import annotations

import dataclasses
from typing import Final

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from gapless.executor.arenas import PlainArenas
from gapless.executor.attention import (
    GatherAttention,
    PackedRows,
    UnsupportedModelError,
    packed_logits,
    plan_rows,
)
from gapless.executor.kv import KvPool, KvShape

LENGTHS: Final = (5, 9)
"""Two rows, so that a model that mixes up packed rows or their positions shows."""
BLOCK_TOKENS: Final = 4
BLOCK_TABLES: Final = ((3, 1, 0), (5, 2, 4))
TOLERANCE: Final = {
    torch.float64: 1e-6,
    torch.float32: 1e-3,
    torch.bfloat16: 0.1,
    torch.float16: 0.05,
}
"""Largest relative difference in the 2-norm."""


@dataclasses.dataclass(frozen=True, slots=True)
class AttentionCall:
    """What one layer asked of its attention."""

    kv_head_count: int
    head_dim: int
    window: int | None


class _Recorder:
    """A `StepAttention` that computes nothing and remembers who called."""

    def __init__(self) -> None:
        self.calls: dict[int, AttentionCall] = {}
        self.call_count = 0

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scaling: float,
        window: int | None,
    ) -> Tensor:
        assert scaling > 0, scaling
        if not query.shape[-1] == key.shape[-1] == value.shape[-1]:
            raise UnsupportedModelError(
                f"layer {layer} has heads of different sizes for queries, keys and values "
                f"({query.shape[-1]}, {key.shape[-1]}, {value.shape[-1]}), "
                "which this attention does not support"
            )
        self.calls[layer] = AttentionCall(key.shape[1], key.shape[2], window)
        self.call_count += 1
        return query


def reference_logits(module: PreTrainedModel, vocab_size: int) -> Tensor:
    """Last logits of each row, computed alone with the attention the model came with."""
    with torch.inference_mode():
        outputs = [
            module(input_ids=_tokens(row, vocab_size, module.device)[None], use_cache=False).logits
            for row in range(len(LENGTHS))
        ]
        return torch.stack([logits[0, -1] for logits in outputs])


def attention_calls(module: PreTrainedModel, layer_count: int) -> list[AttentionCall]:
    """What each layer of a plugged-in module asks of its attention.

    Raises:
        UnsupportedModelError: some layer does not use the plugged-in attention, or not like others.
    """
    recorder = _Recorder()
    token = torch.zeros(1, dtype=torch.int64, device=module.device)
    with torch.inference_mode():
        packed_logits(module, token, token, token, recorder)
    name = type(module).__name__
    if sorted(recorder.calls) != list(range(layer_count)) or recorder.call_count != layer_count:
        raise UnsupportedModelError(
            f"model {name} has {layer_count} layers, of which {len(recorder.calls)} use the "
            f"plugged-in attention ({recorder.call_count} calls)"
        )
    calls = [recorder.calls[layer] for layer in range(layer_count)]
    if len({(call.kv_head_count, call.head_dim) for call in calls}) > 1:
        raise UnsupportedModelError(
            f"model {name} has layers with different key-value heads, "
            "which this attention does not support"
        )
    return calls


def check_equal(module: PreTrainedModel, shape: KvShape, expected: Tensor) -> None:
    """Compares the packed, paged computation with `reference_logits`.

    Raises:
        UnsupportedModelError: they differ.
    """
    found = _paged_logits(module, shape, expected.shape[-1]).double()
    difference = (found - expected.double()).norm() / expected.double().norm()
    if not difference <= TOLERANCE[shape.dtype]:
        raise UnsupportedModelError(
            f"model {type(module).__name__} computes something else with this attention than with "
            f"its own (relative difference {difference:.2g}): it is not supported"
        )


def _paged_logits(module: PreTrainedModel, shape: KvShape, vocab_size: int) -> Tensor:
    """Both rows in one packed forward over a pool of scattered blocks."""
    device = module.device
    lengths = torch.tensor(LENGTHS, device=device)
    rows = PackedRows(
        query_starts=lengths.cumsum(0) - lengths,
        query_lengths=lengths,
        context_lengths=lengths,
        token_rows=torch.arange(len(LENGTHS), device=device).repeat_interleave(lengths),
        positions=torch.cat([torch.arange(length, device=device) for length in LENGTHS]),
        block_tables=torch.tensor(BLOCK_TABLES, device=device),
    )
    tokens = [_tokens(row, vocab_size, device) for row in range(len(LENGTHS))]
    pool = KvPool(PlainArenas(device), shape, 1 + max(map(max, BLOCK_TABLES)))
    plan = plan_rows(np.array(LENGTHS), np.array(LENGTHS))
    with torch.inference_mode():
        attention = GatherAttention(pool, rows, plan)
        last_tokens = rows.query_starts + rows.query_lengths - 1
        return packed_logits(module, torch.cat(tokens), rows.positions, last_tokens, attention)


def _tokens(row: int, vocab_size: int, device: torch.device) -> Tensor:
    """Some token ids of a row, ``[LENGTHS[row]]``."""
    return (torch.arange(LENGTHS[row], device=device) * 37 + 11 * row + 1) % vocab_size
