"""The check at load of a fused decoder: a few tokens through it and through the model's own layers.

Owns the proof that fusing changed nothing but rounding. Computes over a small pool of its own, so
that nothing which serves is touched. Knows nothing of what the fused form is made of. Called by
`cuda_start` and `cpu_start`, before anything is served; see `probe` for the check of the attention.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from typing import Final, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from gapless.executor.arenas import PlainArenas
from gapless.executor.attention import Int64s
from gapless.executor.cuda_attention import CudaAttention, StepRows
from gapless.executor.kv import KvPool
from gapless.executor.model import Model
from gapless.executor.probe import TOLERANCE

PROMPT_LENGTHS: Final = (1, 9, 64)
"""Rows of the prefill. The next token of the last stands in a new block, if blocks are small."""

log = logging.getLogger(__name__)


class Form(Protocol):
    """A way from token ids to logits, as `fused.FusedDecoder` has it."""

    def logits(
        self,
        token_ids: Tensor,
        positions: Tensor,
        last_tokens: Tensor | None,
        attention: CudaAttention,
    ) -> Tensor: ...


FormT = TypeVar("FormT", bound=Form)
MakeAttention = Callable[[KvPool, int, int], CudaAttention]
"""Of a pool and the most rows and tokens of a step; not captured."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Plain:
    """The model's own layers in the same form."""

    model: Model

    def logits(
        self,
        token_ids: Tensor,
        positions: Tensor,
        last_tokens: Tensor | None,
        attention: CudaAttention,
    ) -> Tensor:
        if last_tokens is None:
            last_tokens = torch.arange(len(token_ids), device=token_ids.device)
        return self.model.logits(token_ids, positions, last_tokens, attention)


@dataclasses.dataclass(frozen=True, slots=True)
class _ProbeStep:
    """A step of the check: for the host, and on the device."""

    query_lengths: Int64s
    context_lengths: Int64s
    rows: StepRows
    token_ids: Tensor
    last_tokens: Tensor | None
    """None: each token is its row's last."""


def checked(
    fused: FormT, model: Model, block_tokens: int, make_attention: MakeAttention
) -> FormT | None:
    """`fused` if it computes what `model` computes, else None, and the log says by how much not.

    Both prefill a few rows and decode one token of each, with the same attention; the largest
    relative difference of a step's logits (2-norm) must stay within `probe.TOLERANCE`.
    """
    difference = relative_difference(fused, model, block_tokens, make_attention)
    bound = TOLERANCE[model.shape.dtype]
    if difference <= bound:
        log.info(
            "the fused decoder agrees with the plain one (relative difference %.2g)", difference
        )
        return fused
    log.warning(
        "%s runs unfused: the fused decoder computes something else than the plain one "
        "(relative difference %.2g, bound %.2g)",
        model.shape.architecture,
        difference,
        bound,
    )
    return None


def relative_difference(
    fused: Form, model: Model, block_tokens: int, make_attention: MakeAttention
) -> float:
    """See `checked`; NaN if something is not finite."""
    lengths = np.minimum(PROMPT_LENGTHS, model.shape.context_length - 1)
    block_counts = -(-(lengths + 1) // block_tokens)
    device = model.module.device
    shape = model.shape.kv_shape(block_tokens)
    pool = KvPool(PlainArenas(device), shape, 1 + int(block_counts.sum()))
    tables = _scattered_tables(block_counts)
    steps = [
        _probe_step(model, pool, tables, lengths, lengths),
        _probe_step(model, pool, tables, np.ones_like(lengths), lengths + 1),
    ]
    attention = make_attention(pool, len(lengths), int(lengths.sum()))
    differences = []
    with torch.inference_mode():
        for exact, found in zip(
            *(_run(form, steps, pool, attention) for form in (_Plain(model), fused)), strict=True
        ):
            differences.append((found - exact).norm() / exact.norm())
        return float(torch.stack(differences).amax())


def _run(
    form: Form, steps: list[_ProbeStep], pool: KvPool, attention: CudaAttention
) -> list[Tensor]:
    """Logits of each step, float64. A form sees no key and no value but those it stored itself."""
    pool.tensor.fill_(torch.nan)
    pool.tensor[:, :, 0] = 0.0
    logits = []
    for step in steps:
        queries, contexts = step.query_lengths, step.context_lengths
        attention.plan(queries.astype(np.int32), contexts.astype(np.int32))
        attention.bind(step.rows)
        found = form.logits(step.token_ids, step.rows.positions, step.last_tokens, attention)
        logits.append(found.double())
    return logits


def _scattered_tables(block_counts: Int64s) -> Int64s:
    """Block tables ``[rows, blocks]`` over all blocks but scratch, the last block first."""
    tables = np.zeros((len(block_counts), int(block_counts.max())), np.int64)
    free = np.arange(int(block_counts.sum()), 0, -1)
    for row, count in enumerate(block_counts.tolist()):
        tables[row, :count], free = free[:count], free[count:]
    return tables


def _probe_step(
    model: Model, pool: KvPool, tables: Int64s, queries: Int64s, contexts: Int64s
) -> _ProbeStep:
    """A step whose row r has the last ``queries[r]`` of ``contexts[r]`` tokens."""
    device = pool.device
    token_rows = np.repeat(np.arange(len(queries)), queries)
    ends = queries.cumsum()
    positions = (contexts - ends)[token_rows] + np.arange(int(ends[-1]))
    blocks = tables[token_rows, positions // pool.block_tokens]
    places = blocks * pool.block_tokens + positions % pool.block_tokens
    token_ids = (positions * 37 + 11 * token_rows + 1) % model.shape.vocab_size

    def on_device(array: Int64s, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.from_numpy(array).to(device, dtype)

    rows = StepRows(
        query_indptr=on_device(np.concatenate([[0], ends]), torch.int32),
        context_lengths=on_device(contexts, torch.int32),
        block_tables=on_device(tables, torch.int32),
        write_slots=on_device(places),
        token_rows=on_device(token_rows),
        positions=on_device(positions),
    )
    last_tokens = None if int(queries.max()) == 1 else on_device(ends - 1)
    return _ProbeStep(queries, contexts, rows, on_device(token_ids), last_tokens)
