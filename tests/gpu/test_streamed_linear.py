"""The streamed product against float64, over rows, odd sizes and all its forms."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.gpu.test_kernels import BFLOAT16_BOUND, random, relative

SUM_BOUND = 1e-5
"""Relative error of float32 sums of products of bfloat16."""
SIZES = [(96, 576), (1536, 576), (576, 1536), (4096, 4096), (1000, 712)]
"""Outs and ins: of small and large models, and some that no tile divides."""


@pytest.fixture(autouse=True)
def _hopper() -> None:
    from gapless.executor import streamed_linear

    if not streamed_linear.serves([random(64, 64)]):
        pytest.skip("the kernel needs Hopper's matrix units")


@pytest.mark.parametrize(("outs", "ins"), SIZES)
@pytest.mark.parametrize("rows", [1, 2, 7, 16, 17, 32, 40, 64])
def test_partial_sums_and_bias(rows: int, outs: int, ins: int) -> None:
    from gapless.executor import streamed_linear

    x, weight, bias = random(rows, ins), random(outs, ins), random(outs)
    exact = x.double() @ weight.double().t()
    parts = streamed_linear.partial_sums(x, weight)
    assert relative(parts.sum(0), exact) < SUM_BOUND
    with_bias = streamed_linear.partial_sums(x, weight, bias)
    assert relative(with_bias.sum(0), exact + bias.double()) < SUM_BOUND
    assert torch.equal(parts[1:], with_bias[1:])


@pytest.mark.parametrize(("outs", "ins"), SIZES)
@pytest.mark.parametrize("rows", [1, 5, 16, 32, 64])
def test_product_writes_all_of_its_rows_and_no_others(rows: int, outs: int, ins: int) -> None:
    from gapless.executor import streamed_linear

    x, weight = random(rows, ins), random(outs, ins)
    room = torch.full((rows + 1, outs), float("nan"), device="cuda", dtype=torch.bfloat16)
    streamed_linear.product(x, weight, room[:rows])
    assert relative(room[:rows], x.double() @ weight.double().t()) < BFLOAT16_BOUND
    assert room[rows].isnan().all()


@pytest.mark.parametrize(("width", "ins"), SIZES)
@pytest.mark.parametrize("rows", [1, 5, 16, 32, 64])
def test_gated_product(rows: int, width: int, ins: int) -> None:
    from gapless.executor import streamed_linear

    x, gate_up = random(rows, ins), random(2 * width, ins) * 0.05
    gate, up = (x.double() @ gate_up.double().t()).chunk(2, dim=-1)
    exact = torch.nn.functional.silu(gate) * up
    assert relative(streamed_linear.gated_product(x, gate_up), exact) < 1.5 * BFLOAT16_BOUND


def test_same_input_same_output() -> None:
    from gapless.executor import streamed_linear

    x, weight = random(32, 4096), random(4096, 4096)
    first = streamed_linear.partial_sums(x, weight)
    for _ in range(20):
        assert torch.equal(streamed_linear.partial_sums(x, weight), first)


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    from gapless.executor import streamed_linear

    x, weight = random(32, 1024), random(512, 1024)
    together = streamed_linear.partial_sums(x, weight)
    x[1:] = random(31, 1024)
    assert torch.equal(streamed_linear.partial_sums(x, weight)[:, 0], together[:, 0])


def test_a_chain_that_overlaps_reads_only_what_is_written() -> None:
    """Kernels that start early must wait for their input: each link needs the one before it."""
    from gapless.executor import kernels, streamed_linear

    width = 2048
    weights = [random(width, width) for _ in range(12)]
    gain = torch.ones(width, device="cuda", dtype=torch.bfloat16)

    def chain(x: Tensor, *, apart: bool) -> Tensor:
        residual = torch.zeros_like(x)
        for weight in weights:
            x = kernels.add_rms_norm(x, residual, gain, 1e-5)
            x = streamed_linear.partial_sums(x, weight)
            if apart:
                torch.cuda.synchronize()
        return kernels.add_rms_norm(x, residual, gain, 1e-5)

    for _ in range(20):
        x = random(32, width)
        assert torch.equal(chain(x, apart=False), chain(x, apart=True))
