"""The streamed product without a GPU: its tilings, and that it compiles for the one it is for."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

from gapless.executor import streamed_linear
from tests.executor.compiling import compiled_count


@pytest.mark.parametrize("rows", [1, 16, 17, 32, 33, 64])
@pytest.mark.parametrize(("outs", "ins"), [(576, 576), (6144, 4096), (4096, 14336), (64, 100)])
def test_a_tiling_covers_the_product_once(rows: int, outs: int, ins: int) -> None:
    chosen = streamed_linear.tiling(rows, outs, ins)
    tiles = -(-ins // streamed_linear.TILE_INS)
    assert chosen.rows >= rows
    assert (chosen.parts - 1) * chosen.depth < tiles <= chosen.parts * chosen.depth
    assert streamed_linear.tiling(rows, outs, ins, split=False).parts == 1


def test_a_tiling_depends_on_the_bucket_alone() -> None:
    assert streamed_linear.tiling(17, 4096, 4096) == streamed_linear.tiling(32, 4096, 4096)


def test_the_kernel_compiles_for_hopper() -> None:
    assert compiled_count("tests.executor.compile_streamed_linear") == 7
