"""What is made of a profiler's record: steps, holes, summaries, tables. No GPU is needed."""

from __future__ import annotations

import random

import pytest

from benchmarks import check_stamps, profile_step
from benchmarks.kernel_record import Kernel, divide
from tests.gpu.serving import StepStamps

STAMPS = [StepStamps(2, 2, 0, 1_000, 21_000), StepStamps(2, 9, 0, 31_000, 61_000)]
FIRST = [
    Kernel("_stamp", 100.0, 101.0),
    Kernel("gemm", 101.0, 111.0),
    Kernel("gemm", 109.0, 115.0),
    Kernel("norm", 110.0, 111.0),
    Kernel("norm", 117.0, 119.0),
    Kernel("_stamp", 119.0, 120.0),
]
SECOND = [
    Kernel("_stamp", 130.0, 131.0),
    Kernel("gemm", 135.0, 155.0),
    Kernel("_stamp", 158.0, 160.0),
]


def test_stamps_divide_a_record_into_steps() -> None:
    kernels = [*FIRST, Kernel("between", 125.0, 126.0), *SECOND]
    random.Random(0).shuffle(kernels)
    first, second = divide(kernels, STAMPS)
    assert list(first.kernels) == FIRST
    assert list(second.kernels) == SECOND
    assert (first.is_decode, second.is_decode) == (True, False)


def test_overlapping_kernels_count_once() -> None:
    first, second = divide([*FIRST, *SECOND], STAMPS)
    assert (first.profiled_us, first.stamped_us, first.holes_us()) == (20.0, 20.0, [2.0])
    assert first.busy_us() == 18.0
    assert (second.profiled_us, second.holes_us(), second.busy_us()) == (30.0, [4.0, 3.0], 23.0)


def test_a_record_that_lacks_a_stamp_is_refused() -> None:
    with pytest.raises(AssertionError, match="3 stamp kernels of 2 steps"):
        divide([*FIRST, *SECOND[:-1]], STAMPS)


def test_the_summary_compares_kernels_with_stamps() -> None:
    found = check_stamps.summary(divide([*FIRST, *SECOND], STAMPS), STAMPS[:1])
    assert (found["stamped_us"], found["profiled_us"], found["busy_us"]) == (25.0, 25.0, 20.5)
    assert found["busy_share"] == found["busy_share_of_stamped"] == 0.82
    assert (found["hole_us_max"], found["hole_us_mean"]) == (4.0, 3.0)
    assert found["stamped_us_p50_without_profiler"] == 20.0
    assert check_stamps.summary(divide(FIRST, STAMPS[:1]), [])["hole_us_max"] == 2.0


def test_own_times_add_up_to_the_busy_time() -> None:
    first, second = divide([*FIRST, *SECOND], STAMPS)
    assert first.own_us() == [1.0, 10.0, 4.0, 0.0, 2.0, 1.0]
    assert sum(first.own_us()) == first.busy_us()
    assert sum(second.own_us()) == second.busy_us()


def test_the_table_is_of_a_mean_step() -> None:
    rows = profile_step.table(divide([*FIRST, *SECOND], STAMPS))
    assert [row["name"] for row in rows] == ["gemm", "_stamp", "norm"]
    assert rows[0] == {
        "name": "gemm",
        "calls_per_step": 1.5,
        "us_per_step": 17.0,
        "us_per_call": 11.33,
        "share": round(34 / 41, 4),
    }


def test_the_last_product_is_the_head_and_what_follows_samples() -> None:
    steps = divide([*FIRST, *SECOND], STAMPS)
    assert profile_step.parts_of(steps[0]) == {
        "products": 10.0,
        "attention": 0.0,
        "norms, rotary, SwiGLU": 0.0,
        "head": 4.0,
        "sampling": 3.0,
        "rows": 1.0,
    }
    found = profile_step.summary("Batch 2", steps, [24.0], {"head": 6.0})
    assert sum(row["us"] for row in found["parts"]) == found["busy_us"] == 20.5
    names = {"preset": "tiny", "gpu": "none", "torch": "2", "attention": "none"}
    text = profile_step.markdown({**names, "loads": [found]})
    assert "Its parts add up to 20 µs, 82.0 % of it." in text
    assert "| head | 12 | 6 |\n" in text
    assert "| `gemm` | 1.5 | 17.0 | 82.9 % |\n" in text
