"""The fused decoder of the CPU: as exact as the plain one, in any dtype, packed or not."""

from __future__ import annotations

import copy
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear
from transformers import AutoModelForCausalLM

from gapless.executor import cpu_start
from gapless.executor.arenas import PlainArenas
from gapless.executor.cores import in_passing_thread, use_cores
from gapless.executor.cpu_decoder import CpuDecoder, RmsNorm
from gapless.executor.cpu_products import PackedProduct, PlainProduct, Product, can_pack
from gapless.executor.decoder_weights import DecoderWeights, decoder_weights
from gapless.executor.kv import KvPool
from gapless.executor.model import Model
from gapless.executor.seats import SeatCopy
from gapless.executor.step import Decoder, StepRunner
from gapless.protos.sampling import Sampling
from gapless.protos.seats import SeatLayout
from tests.executor.steps import CPU, Row, make_frame, seat_words
from tests.models import VOCAB_SIZE, tiny_model_folder

use_cores(1)
DTYPES = [torch.float64, torch.float32, torch.bfloat16]
KINDS: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": True},
    "qwen2": {},
    "qwen3": {},
    "mistral": {"sliding_window": 6},
}
BIASED_KIND = "qwen2"
BLOCK_TOKENS = 4
CONTEXTS = (19, 12, 19, 3)
PRODUCT_BOUND = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 1e-2}
"""Relative error in the 2-norm."""
FLOAT32_NORMS = 1e-6
"""Transformers' norms round to float32 in any dtype, the reference's too."""


def relative(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact).norm() / exact.norm())


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("rows", [1, 5, 64])
@pytest.mark.parametrize("dtype", DTYPES)
def test_products_are_those_of_the_weight(dtype: torch.dtype, rows: int, has_bias: bool) -> None:
    random = torch.Generator().manual_seed(rows)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random).to(dtype)

    weight, bias = draw(48, 80), draw(48) if has_bias else None
    x, other = draw(rows, 80), draw(rows, 48)
    exact = linear(x.double(), weight.double(), None if bias is None else bias.double())
    products: list[Product] = [PlainProduct(weight, bias)]
    if can_pack(dtype):
        products.append(PackedProduct(weight, bias))
    for product in products:
        bound = PRODUCT_BOUND[dtype]
        assert relative(product.of(x), exact) < bound
        assert relative(product.plus(x, other), exact + other.double()) < bound


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
@pytest.mark.parametrize("shape", [(1, 80), (5, 3, 64), (64, 576)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_norms_are_exact(dtype: torch.dtype, shape: tuple[int, ...], scale: float) -> None:
    """Also where all is on one side of zero, and where one element outweighs the others."""
    random = torch.Generator().manual_seed(0)
    x = scale * torch.randn(*shape, generator=random, dtype=torch.float64).abs()
    x[..., 7] *= 1000
    weight = torch.randn(shape[-1], generator=random).to(dtype)
    x = x.to(dtype)
    mean_square = x.double().square().mean(dim=-1, keepdim=True)
    exact = x.double() * (mean_square + 1e-5).rsqrt() * weight.double()
    assert relative(RmsNorm(weight, 1e-5).of(x), exact) < PRODUCT_BOUND[dtype] / 3


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_the_fused_decoder_is_as_exact_as_the_plain_one(
    tmp_path: Path, kind: str, dtype: torch.dtype
) -> None:
    """A prefill of rows of unlike lengths, then one token of each, over scattered blocks."""
    folder = tiny_model_folder(tmp_path, model_type=kind, **KINDS[kind])
    model = Model.load(folder, dtype, CPU, PlainArenas(CPU))
    _make_biases_count(model)
    weights = decoder_weights(model.module, model.shape.context_length)
    assert isinstance(weights, DecoderWeights), weights
    assert (weights.layers[0].qkv_bias is not None) == (kind == BIASED_KIND)
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    reference.load_state_dict({name: each.double() for name, each in _state(model).items()})
    exact = _plain_logits(reference)

    plain_error = relative(_logits(model, model), exact)
    for is_packed in {False, can_pack(dtype)}:
        fused = CpuDecoder(weights, is_packed=is_packed)
        error = relative(_logits(model, fused), exact)
        assert error < 1.5 * plain_error + FLOAT32_NORMS, f"packed: {is_packed}"


def _make_biases_count(model: Model) -> None:
    """Random models have biases of 0."""
    for name, parameter in model.module.named_parameters():
        if name.endswith("bias"):
            with torch.no_grad():
                parameter.copy_(torch.linspace(-0.5, 0.5, len(parameter)))


def _state(model: Model) -> dict[str, Tensor]:
    return dict(model.module.state_dict())


def _tokens(row: int) -> list[int]:
    return [3 + (7 + 4 * row) * k % (VOCAB_SIZE - 3) for k in range(CONTEXTS[row])]


def _plain_logits(reference: Any) -> Tensor:
    """Behind each row's last token and the one before, float64 ``[2 * rows, vocab_size]``."""
    with torch.inference_mode():
        all_logits = [
            reference(torch.tensor([_tokens(row)])).logits[0] for row in range(len(CONTEXTS))
        ]
    before = torch.stack([logits[-2] for logits in all_logits])
    return torch.cat([before, torch.stack([logits[-1] for logits in all_logits])])


def _logits(model: Model, decoder: Decoder) -> Tensor:
    """The same, of steps of `decoder`."""
    row_count = len(CONTEXTS)
    pool = KvPool(PlainArenas(CPU), model.shape.kv_shape(BLOCK_TOKENS), 1 + 5 * row_count)
    pool.tensor.fill_(torch.nan)
    seats = SeatCopy(SeatLayout(seat_count=row_count + 1, block_max=8), CPU)
    runner = StepRunner(model, pool, seats, row_count, decoder)
    for row in range(row_count):
        blocks = [1 + row + row_count * k for k in reversed(range(5))]
        runner.apply_assignments(seat_words(seats.layout, row + 1, blocks, Sampling()))
    rows = range(row_count)
    prefill = make_frame([Row(row + 1, _tokens(row)[:-1], 0) for row in rows])
    decode = make_frame([Row(row + 1, _tokens(row)[-1:], CONTEXTS[row] - 1) for row in rows])
    with torch.inference_mode():
        steps = [
            runner.forward(runner.stage(each), runner.no_tokens()) for each in (prefill, decode)
        ]
    return torch.cat(steps).double()


def test_a_model_of_another_kind_runs_unfused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tiny_model_folder(tmp_path, model_type="gemma3_text", layers=7)
    model = Model.load(folder, torch.float32, CPU, PlainArenas(CPU))
    assert cpu_start.cpu_decoder(model, BLOCK_TOKENS) is model
    assert "Gemma3ForCausalLM runs unfused" in caplog.text


def test_a_fused_form_that_computes_something_else_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = Model.load(tiny_model_folder(tmp_path), torch.float32, CPU, PlainArenas(CPU))
    wrong: Any = copy.deepcopy(model.module)
    with torch.no_grad():
        wrong.model.layers[1].mlp.down_proj.weight.mul_(1.1)
    monkeypatch.setattr(
        cpu_start, "decoder_weights", lambda _, length: decoder_weights(wrong, length)
    )
    assert cpu_start.cpu_decoder(model, BLOCK_TOKENS) is model
    assert "computes something else than the plain one" in caplog.text


def test_weights_are_packed_only_where_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = Model.load(tiny_model_folder(tmp_path), torch.float32, CPU, PlainArenas(CPU))
    monkeypatch.setattr(cpu_start, "available_memory_bytes", lambda: 1000)
    with caplog.at_level(logging.INFO):
        assert isinstance(cpu_start.cpu_decoder(model, BLOCK_TOKENS), CpuDecoder)
    assert "weights are not packed" in caplog.text
    assert "agrees with the plain one" in caplog.text


def test_each_thread_has_its_own_number_of_cores() -> None:
    use_cores(1)
    assert in_passing_thread(3, torch.get_num_threads) == 3
    assert in_passing_thread(2, torch.get_num_threads) == 2
    assert torch.get_num_threads() == 1


def test_what_fails_in_the_passing_thread_fails_here() -> None:
    def work() -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        in_passing_thread(1, work)
