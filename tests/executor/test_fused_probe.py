"""The check of a fused decoder at load: what computes the same passes, what does not falls back.

A stand-in takes the fused form's place (the real one needs a GPU; tests/gpu checks it there): the
model's own layers, over its weights or over a copy of them with one fault.
"""

from __future__ import annotations

import copy
import dataclasses
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from gapless.executor.arenas import PlainArenas
from gapless.executor.attention import packed_logits
from gapless.executor.cuda_attention import CudaAttention, Gathered
from gapless.executor.fused_probe import checked, relative_difference
from gapless.executor.kv import KvPool
from gapless.executor.model import Model
from gapless.executor.probe import TOLERANCE
from tests.executor.steps import CPU
from tests.models import tiny_model_folder

PROJECTIONS = (
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
)


@dataclasses.dataclass(frozen=True, slots=True)
class Form:
    """A decoder over `module`, as a fused form presents itself."""

    module: Any
    misplaces_keys: bool = False
    forgets_last_tokens: bool = False
    decode_is_off: bool = False

    def logits(
        self,
        token_ids: Tensor,
        positions: Tensor,
        last_tokens: Tensor | None,
        attention: CudaAttention,
    ) -> Tensor:
        everything = torch.arange(len(token_ids))
        chosen = everything if last_tokens is None else last_tokens
        if self.forgets_last_tokens and last_tokens is not None:
            chosen = everything[: len(last_tokens)]
        if self.misplaces_keys:
            attention = _Misplacing(attention)  # type: ignore[assignment]
        moved = positions + 1 if self.decode_is_off and last_tokens is None else positions
        return packed_logits(self.module, token_ids, moved, chosen, attention)


@dataclasses.dataclass(frozen=True, slots=True)
class _Misplacing:
    """Attention that stores nothing: what it reads must then be what others stored."""

    attention: CudaAttention

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float, window: None
    ) -> Tensor:
        return self.attention.read(layer, query, scaling, window)


def gathered(pool: KvPool, row_count: int, token_count: int) -> CudaAttention:
    return Gathered(pool)


def load(path: Path, dtype: torch.dtype, **fields: Any) -> Model:
    return Model.load(tiny_model_folder(path, **fields), dtype, CPU, PlainArenas(CPU))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return load(tmp_path_factory.mktemp("tiny"), torch.float32)


@pytest.mark.parametrize("block_tokens", [1, 16, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_form_that_computes_the_same_is_kept(
    tmp_path: Path, dtype: torch.dtype, block_tokens: int, caplog: pytest.LogCaptureFixture
) -> None:
    model = load(tmp_path, dtype)
    form = Form(copy.deepcopy(model.module))
    with caplog.at_level(logging.INFO):
        assert checked(form, model, block_tokens, gathered) is form
    assert "agrees" in caplog.text


def test_a_short_context_is_enough(tmp_path: Path) -> None:
    model = load(tmp_path, torch.float32, context_length=16)
    form = Form(model.module)
    assert checked(form, model, 16, gathered) is form


@pytest.mark.parametrize("projection", PROJECTIONS)
@pytest.mark.parametrize("layer", [0, 1])
def test_one_wrong_weight_falls_back(
    model: Model, projection: str, layer: int, caplog: pytest.LogCaptureFixture
) -> None:
    wrong: Any = copy.deepcopy(model.module)
    weight = wrong.model.layers[layer].get_submodule(projection).weight
    weight.copy_(weight.flip(0))
    assert checked(Form(wrong), model, 16, gathered) is None
    assert "runs unfused" in caplog.text
    difference = relative_difference(Form(wrong), model, 16, gathered)
    assert difference > 10 * TOLERANCE[torch.float32]
    assert f"relative difference {difference:.2g}, bound 0.001" in caplog.text


@pytest.mark.parametrize("fault", ["misplaces_keys", "forgets_last_tokens", "decode_is_off"])
def test_a_wrong_way_falls_back(model: Model, fault: str) -> None:
    form = Form(model.module, **{fault: True})
    assert checked(form, model, 16, gathered) is None


def test_nothing_that_serves_is_touched(model: Model) -> None:
    pools: list[KvPool] = []

    def watched(pool: KvPool, row_count: int, token_count: int) -> CudaAttention:
        pools.append(pool)
        return Gathered(pool)

    weights = [weight.clone() for weight in model.module.parameters()]
    checked(Form(model.module), model, 16, watched)
    (pool,) = pools
    assert pool.block_count == 1 + 1 + 1 + 5  # scratch, and what the rows need: a pool of its own
    assert torch.equal(pool.tensor[:, :, 0], torch.zeros_like(pool.tensor[:, :, 0]))
    for before, after in zip(weights, model.module.parameters(), strict=True):
        assert torch.equal(before, after)
