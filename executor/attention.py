"""Attention over the paged KV pool: one function for prefill chunks, decode and mixtures.

Owns the seam to transformers (`register`, `attend`) and the plain backend. Knows rows, block
tables and the pool; knows nothing of seats, sampling or models. Called by the step, once a layer.

A step's attention has two halves. `plan_rows` runs on the host, from the frame's numbers alone, and
decides how rows are batched. `GatherAttention` turns that into index tensors on the device once a
step, and then serves each layer: it writes the new keys and values to their places in the pool,
gathers the positions that each row may see, and calls torch's scaled dot product. A backend with a
real paged kernel takes the same place.

The plain backend reads no position that a row may not see: indices behind a row's context repeat
its last position, so whatever stands in unused parts of blocks (NaN included) never matters.
"""

from __future__ import annotations

import dataclasses
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, PreTrainedModel

from gapless.executor.kv import KvPool

ATTENTION_NAME: Final = "gapless_paged"
"""The plugged-in attention's name in transformers' interface; no mask function has this name, so
that no mask is built."""

WASTE_PAIRS: Final = 8192
"""Query-key pairs of padding that cost about as much as one more scaled dot product call."""

Int64s = npt.NDArray[np.int64]


@dataclasses.dataclass(frozen=True, slots=True)
class RowGroup:
    """Rows that attend in one padded call."""

    rows: Int64s
    """Row numbers, ``[group_rows]``."""
    query_length: int
    """Longest query of the group, in tokens."""
    context_length: int
    """Longest context of the group, in tokens."""


@dataclasses.dataclass(frozen=True, slots=True)
class AttentionPlan:
    """How the rows of a step are batched. Made on the host."""

    groups: tuple[RowGroup, ...]
    in_order: bool
    """One group, whose queries are the packed tokens as they stand: nothing has to be picked."""


def plan_rows(query_lengths: Int64s, context_lengths: Int64s) -> AttentionPlan:
    """Groups rows of like shape, so that one long row does not pad all others.

    Rows are taken in descending order of (query length, context length). A row joins the open group
    unless padding it to the group's shape wastes more than its own work and more than a call costs.
    """
    order = np.lexsort((-context_lengths, -query_lengths))
    groups: list[list[int]] = []
    shape = (0, 0)
    for row in order.tolist():
        query, context = int(query_lengths[row]), int(context_lengths[row])
        if groups and context <= shape[1]:
            waste = shape[0] * shape[1] - query * context
            if waste <= max(WASTE_PAIRS, query * context):
                groups[-1].append(row)
                continue
        groups.append([row])
        shape = (query, context)
    return AttentionPlan(
        tuple(
            RowGroup(
                np.array(sorted(rows), dtype=np.int64),
                int(query_lengths[rows].max()),
                int(context_lengths[rows].max()),
            )
            for rows in groups
        ),
        in_order=len(groups) == 1 and bool((query_lengths == query_lengths[0]).all()),
    )


@dataclasses.dataclass(frozen=True, slots=True)
class PackedRows:
    """The rows of a step as a backend needs them, on the device, int64."""

    query_starts: Tensor
    """``[rows]``: where a row's tokens begin among the packed ones."""
    query_lengths: Tensor
    context_lengths: Tensor
    token_rows: Tensor
    """``[tokens]``: the row of each packed token."""
    positions: Tensor
    """``[tokens]``: its absolute position in its sequence."""
    block_tables: Tensor
    """``[rows, blocks]``, enough for the longest context of the step."""


class StepAttention(Protocol):
    """What the model's layers call during one step."""

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scaling: float,
        window: int | None,
    ) -> Tensor:
        """Stores key and value ``[tokens, kv_heads, dim]``, returns ``[tokens, heads, dim]``.

        `query` is ``[tokens, heads, dim]``. `window`: how many positions back a token sees, itself
        included; None sees all.
        """


class UnsupportedModelError(ValueError):
    """A model needs something that this executor would compute wrongly."""


HARMLESS_ARGUMENTS: Final = frozenset(
    {
        "dropout",
        "position_ids",
        "use_cache",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "return_dict",
    }
)
"""What models pass to their attention that changes nothing here."""


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    step_attention: StepAttention | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    **others: object,
) -> tuple[Tensor, None]:
    """transformers' attention interface over one packed batch.

    Takes ``[1, heads, tokens, dim]``, returns ``[1, tokens, heads, dim]`` and no weights.

    Raises:
        UnsupportedModelError: the model asks for more than causal attention with a window.
    """
    unknown = [name for name, value in others.items() if value is not None]
    _check_arguments(module, [name for name in unknown if name not in HARMLESS_ARGUMENTS])
    if attention_mask is not None:
        _check_arguments(module, ["attention_mask"])
    if is_causal is False or getattr(module, "is_causal", True) is False:
        _check_arguments(module, ["attention that is not causal"])
    if step_attention is None:
        _check_arguments(module, ["layers that do not pass arguments on to their attention"])
    assert step_attention is not None
    layer = module.layer_idx
    assert isinstance(layer, int), layer
    output = step_attention.attend(
        layer,
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        query.shape[-1] ** -0.5 if scaling is None else scaling,
        sliding_window,
    )
    return output.unsqueeze(0), None


def plug_in(module: PreTrainedModel) -> None:
    """Makes all attention of `module` go through `attend`.

    Raises:
        UnsupportedModelError: the model takes no other attention.
    """
    AttentionInterface.register(ATTENTION_NAME, attend)
    try:
        module.set_attn_implementation(ATTENTION_NAME)
    except ValueError as error:
        raise UnsupportedModelError(
            f"model {type(module).__name__} takes no other attention than its own"
        ) from error


def packed_logits(
    module: PreTrainedModel,
    token_ids: Tensor,
    positions: Tensor,
    last_tokens: Tensor,
    attention: StepAttention,
) -> Tensor:
    """Calls a plugged-in module on packed tokens; see `model.Model.logits`."""
    output = module(
        input_ids=token_ids[None],
        position_ids=positions[None],
        use_cache=False,
        logits_to_keep=last_tokens,
        step_attention=attention,
    )
    logits: Tensor = output.logits
    return logits[0]


def _check_arguments(module: nn.Module, unsupported: list[str]) -> None:
    if unsupported:
        raise UnsupportedModelError(
            f"model {type(module).__name__} uses {', '.join(unsupported)}, "
            "which this attention does not support"
        )


@dataclasses.dataclass(frozen=True, slots=True)
class _Group:
    """A group's index tensors, made once a step."""

    query_index: Tensor
    """``[rows * query]`` into the packed tokens; padding repeats a row's last token."""
    key_slots: Tensor
    """``[2 * rows * kv_heads * context]`` into the heads of a layer, keys' before values'; padding
    repeats a row's last position."""
    query_positions: Tensor
    """``[rows, query]``."""
    key_positions: Tensor
    """``[context]``."""


class GatherAttention:
    """The plain backend: gather by block table, then one scaled dot product a group."""

    def __init__(self, pool: KvPool, rows: PackedRows, plan: AttentionPlan) -> None:
        self._pool = pool
        self.write_slots = _slots(rows, rows.token_rows, rows.positions, pool.block_tokens)
        self._groups = [_expand(group, rows, pool) for group in plan.groups]
        self._output_order = None if plan.in_order else _output_order(rows, plan)
        self._masks: dict[int | None, list[Tensor | None]] = {}

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scaling: float,
        window: int | None,
    ) -> Tensor:
        keys, values = self._pool.layer(layer)
        keys.index_copy_(0, self.write_slots, key)
        values.index_copy_(0, self.write_slots, value)
        return self.read(layer, query, scaling, window)

    def pool(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values of a layer, ``[places, kv_heads, dim]``."""
        return self._pool.layer(layer)

    def read(self, layer: int, query: Tensor, scaling: float, window: int | None) -> Tensor:
        """`attend` for keys and values that stand in the pool already."""
        pool = self._pool.tensor[layer]
        groups = zip(self._groups, self._window_masks(window), strict=True)
        if self._output_order is None:
            ((group, mask),) = groups
            return _attend_group(query, pool, group, mask, scaling)
        outputs = [
            _attend_group(query.index_select(0, group.query_index), pool, group, mask, scaling)
            for group, mask in groups
        ]
        return torch.cat(outputs).index_select(0, self._output_order)

    def _window_masks(self, window: int | None) -> list[Tensor | None]:
        """Additive masks of the groups, ``[rows, 1, query, context]``; kept for the step.

        None where all is seen.
        """
        if window not in self._masks:
            dtype = self._pool.dtype
            self._masks[window] = [_mask(group, window, dtype) for group in self._groups]
        return self._masks[window]


def _slots(rows: PackedRows, row: Tensor, position: Tensor, block_tokens: int) -> Tensor:
    """Places in the pool of `position` of `row`, elementwise (broadcast)."""
    block = rows.block_tables[row, position // block_tokens].long()
    return block * block_tokens + position % block_tokens


def _expand(group: RowGroup, rows: PackedRows, pool: KvPool) -> _Group:
    device = rows.positions.device
    members = torch.from_numpy(group.rows).to(device)
    starts = rows.query_starts.index_select(0, members)[:, None]
    lengths = rows.query_lengths.index_select(0, members)[:, None]
    contexts = rows.context_lengths.index_select(0, members)[:, None]
    query_offsets = torch.arange(group.query_length, device=device)[None, :]
    key_positions = torch.arange(group.context_length, device=device)
    query_index = starts + torch.minimum(query_offsets, lengths - 1)
    visible = torch.minimum(key_positions[None, :], contexts - 1)
    places = _slots(rows, members[:, None], visible, pool.block_tokens)
    both = torch.stack([places, places + pool.block_count * pool.block_tokens])
    head_count = pool.shape.kv_head_count
    heads = torch.arange(head_count, device=device)[:, None]
    return _Group(
        query_index=query_index.view(-1),
        key_slots=(both[:, :, None] * head_count + heads).view(-1),
        query_positions=rows.positions.index_select(0, query_index.view(-1)).view_as(query_index),
        key_positions=key_positions,
    )


def _output_order(rows: PackedRows, plan: AttentionPlan) -> Tensor:
    """``[tokens]``: where each packed token's output stands among those of all groups."""
    starts = np.empty(sum(len(group.rows) for group in plan.groups), dtype=np.int64)
    start = 0
    for group in plan.groups:
        size = len(group.rows) * group.query_length
        starts[group.rows] = np.arange(start, start + size, group.query_length)
        start += size
    moved = torch.from_numpy(starts).to(rows.positions.device) - rows.query_starts
    token_places = torch.arange(rows.positions.numel(), device=rows.positions.device)
    return token_places + moved.index_select(0, rows.token_rows)


def _mask(group: _Group, window: int | None, dtype: torch.dtype) -> Tensor | None:
    is_one_token = group.query_positions.shape == (1, 1)
    if is_one_token and (window is None or len(group.key_positions) <= window):
        return None
    query = group.query_positions[:, None, :, None]
    key = group.key_positions[None, None, None, :]
    seen = key <= query
    if window is not None:
        seen &= key > query - window
    nothing = torch.zeros((), dtype=dtype, device=seen.device)
    return torch.where(seen, nothing, -torch.inf)


def _attend_group(
    query: Tensor, pool: Tensor, group: _Group, mask: Tensor | None, scaling: float
) -> Tensor:
    """Outputs of the group's (padded) queries, ``[rows * query, heads, dim]`` to the same.

    `pool` is a layer's ``[2, blocks, block_tokens, kv_heads, dim]``. Heads that share a key-value
    head are further queries of it: so keys and values are repeated for none of them.
    """
    row_count, query_length = group.query_positions.shape
    context_length = len(group.key_positions)
    heads, dim = query.shape[1:]
    kv_heads = pool.shape[-2]
    shared = heads // kv_heads

    queries = (
        query.view(row_count, query_length, kv_heads, shared, dim)
        .permute(0, 2, 3, 1, 4)
        .reshape(row_count, kv_heads, shared * query_length, dim)
    )
    gathered = pool.view(-1, dim).index_select(0, group.key_slots)
    key, value = gathered.view(2, row_count, kv_heads, context_length, dim).unbind(0)
    if query_length == 1 and mask is not None and query.device.type == "cpu":
        output = _attend_one_by_one(queries, key, value, mask, scaling)
    else:
        repeated = None if mask is None else mask.repeat(1, 1, shared, 1)
        output = scaled_dot_product_attention(
            queries, key, value, attn_mask=repeated, scale=scaling
        )
    return (
        output.view(row_count, kv_heads, shared, query_length, dim)
        .permute(0, 3, 1, 2, 4)
        .reshape(row_count * query_length, heads, dim)
    )


def _attend_one_by_one(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float
) -> Tensor:
    """Scaled dot product attention for few queries a head, where torch's own takes thrice as long.

    Takes and returns what that does: ``[rows, kv_heads, queries, dim]``, and an additive mask
    ``[rows, 1, 1, context]``.
    """
    shape = query.shape
    scores = torch.bmm((query * scaling).flatten(0, 1), key.flatten(0, 1).transpose(1, 2))
    weights = scores.view(*shape[:3], -1).add_(mask).softmax(dim=-1)
    return torch.bmm(weights.flatten(0, 1), value.flatten(0, 1)).view(shape)
