"""The small kernels and the fused decoder against float64."""

from __future__ import annotations

import copy
import functools
import logging

import numpy as np
import pytest
import torch
from torch import Tensor

from gapless.executor.arenas import PlainArenas
from gapless.executor.attention_backends import GATHER, available_backends, make_attention
from gapless.executor.cuda_attention import CudaAttention, Gathered, HeadShape, StepRows
from gapless.executor.flashinfer_attention import WORKSPACE_BYTES
from gapless.executor.fused_probe import checked
from gapless.executor.kv import KvPool
from tests.gpu.serving import head_shape, random_model

BFLOAT16_BOUND = 4e-3
"""Relative error of one operation whose result is rounded to bfloat16."""
LAYER_BOUND = 4e-3
"""Relative error against float64 that each layer may add, and so may what is around the layers."""


def relative(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact.double()).norm() / exact.double().norm())


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


@pytest.mark.parametrize("width", [576, 4096, 5120])
def test_norm_of_a_sum(width: int) -> None:
    from gapless.executor import kernels

    x, residual, weight = random(33, width), random(33, width), random(width)
    total = (x + residual).double()
    exact = total * torch.rsqrt(total.square().mean(-1, keepdim=True) + 1e-5) * weight.double()
    normed = kernels.add_rms_norm(x, residual, weight, 1e-5)
    assert relative(normed, exact) < BFLOAT16_BOUND
    assert torch.equal(residual.double(), total)


def test_norm_of_the_first_layer_copies() -> None:
    from gapless.executor import kernels

    x, weight = random(5, 576), random(576)
    residual = torch.full_like(x, float("nan"))
    kernels.add_rms_norm(x, residual, weight, 1e-5, first=True)
    assert torch.equal(residual, x)


@pytest.mark.parametrize("width", [1536, 14336])
def test_silu_and_multiply(width: int) -> None:
    from gapless.executor import kernels

    gate_up = random(33, 2 * width)
    gate, up = gate_up.double().chunk(2, dim=-1)
    exact = torch.nn.functional.silu(gate) * up
    assert relative(kernels.silu_and_multiply(gate_up), exact) < BFLOAT16_BOUND


@pytest.mark.parametrize("layers", [1, 2, 4])
@pytest.mark.parametrize("lengths", [(70, 1, 29), (3, 1, 2), (1,)])
def test_the_fused_decoder_is_as_exact_as_the_plain_one(
    lengths: tuple[int, ...], layers: int
) -> None:
    from gapless.executor.fused import FusedDecoder, recognise

    model = random_model(layers)
    bound = LAYER_BOUND * (layers + 1)
    exact_module = copy.deepcopy(model.module).double()
    exact_module.set_attn_implementation("eager")
    token_ids = torch.randint(0, model.shape.vocab_size, (sum(lengths),), device="cuda")
    positions = torch.cat([torch.arange(length, device="cuda") for length in lengths])
    with torch.inference_mode():
        exact = torch.cat(
            [
                exact_module(input_ids=row[None]).logits[0]
                for row in torch.split(token_ids, list(lengths))
            ]
        )
    pool = KvPool(PlainArenas(torch.device("cuda")), model.shape.kv_shape(16), 20)
    attention = Gathered(pool)
    attention.plan(np.array(lengths, np.int32), np.array(lengths, np.int32))
    attention.bind(step_rows(lengths, positions))
    fused = recognise(model.module, model.shape.context_length)
    assert isinstance(fused, FusedDecoder), fused
    everything = torch.arange(sum(lengths), device="cuda")
    with torch.inference_mode():
        plain_error = relative(model.logits(token_ids, positions, everything, attention), exact)
        out = torch.full_like(exact, float("nan"), dtype=model.shape.dtype)
        fused.logits(token_ids, positions, None, attention, out)
        fused_error = relative(out, exact)
        last = torch.tensor(lengths, device="cuda").cumsum(0) - 1
        chosen = fused.logits(token_ids, positions, last, attention)
    assert fused_error < bound
    assert fused_error < 1.5 * plain_error
    assert relative(chosen, exact[last]) < bound


@pytest.mark.parametrize("is_wrong", [False, True], ids=["right", "wrong"])
def test_the_check_at_load_leaves_out_a_decoder_with_one_wrong_weight(is_wrong: bool) -> None:
    from gapless.executor.fused import FusedDecoder, recognise

    model, copied = random_model(), random_model()
    if is_wrong:
        weight = copied.module.model.layers[2].mlp.down_proj.weight
        weight.copy_(weight.flip(0))
    fused = recognise(copied.module, copied.shape.context_length)
    assert isinstance(fused, FusedDecoder), fused
    heads = head_shape(model)
    workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device="cuda")
    for name in available_backends(heads, windows=False, block_tokens=16):
        attention = functools.partial(_loose, name, heads, workspace)
        assert (checked(fused, model, 16, attention) is None) == is_wrong, name


def _loose(
    name: str, heads: HeadShape, workspace: Tensor, pool: KvPool, rows: int, tokens: int
) -> CudaAttention:
    return make_attention(name, pool, heads, workspace, rows, tokens, captured=False)


def test_the_fused_form_is_checked_at_load(caplog: pytest.LogCaptureFixture) -> None:
    from gapless.executor.cuda_start import fused_form

    model = random_model()
    with caplog.at_level(logging.INFO):
        assert fused_form(model, head_shape(model), 16, GATHER) is not None
    assert "the fused decoder agrees with the plain one" in caplog.text


def step_rows(lengths: tuple[int, ...], positions: Tensor) -> StepRows:
    """Prefill rows of `lengths` from position 0, five blocks of 16 each."""
    tables = torch.arange(1, 1 + 5 * len(lengths), dtype=torch.int32, device="cuda").view(-1, 5)
    counts = torch.tensor(lengths, device="cuda")
    token_rows = torch.repeat_interleave(counts)
    places = tables[token_rows, positions // 16].long() * 16 + positions % 16
    indptr = torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int()
    return StepRows(indptr, counts.int(), tables, places, token_rows, positions)


def test_fused_weights_are_views_of_the_arena() -> None:
    from gapless.executor.decoder_weights import side_by_side

    model = random_model(1)
    attention = model.module.model.layers[0].self_attn
    weights = [attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight]
    together = side_by_side([weight.detach() for weight in weights])
    assert together.data_ptr() == weights[0].data_ptr()
    assert torch.equal(together, torch.cat(weights))
    apart = [weights[0].detach(), weights[2].detach()]
    assert torch.equal(side_by_side(apart), torch.cat(apart))


def test_the_gather_serves_any_model() -> None:
    found = available_backends(head_shape(random_model(1)), windows=True, block_tokens=16)
    assert found[-1] == GATHER
