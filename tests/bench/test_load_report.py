"""The arithmetic of a load, on requests whose numbers can be checked by hand."""

from __future__ import annotations

import dataclasses
from array import array
from types import MappingProxyType
from typing import Any

import pytest

from gapless.bench import load_report, load_table
from gapless.bench.calls import Record
from gapless.bench.generator import Driven
from gapless.bench.load_options import LoadOptions, parse
from gapless.bench.load_report import Measured
from gapless.bench.work import batch
from gapless.client.values import ServerStats


def options(*words: str) -> LoadOptions:
    return parse(["--server", "x", "--concurrency", "2", *words])


def record(*pieces: tuple[float, int], sent_s: float = 0.0, **fields: Any) -> Record:
    """A request that should have been sent at 0 and got pieces: when, and of how many tokens."""
    times, counts = zip(*pieces, strict=True) if pieces else ((), ())
    return Record(
        new_tokens=sum(counts),
        intended_s=0.0,
        sent_s=sent_s,
        ended_s=fields.pop("ended_s", times[-1] if times else 1.0),
        piece_s=array("d", times),
        piece_tokens=array("q", counts),
        **fields,
    )


def stats(counts: tuple[int, ...], active_s: float, bubble_s: float, steps: int) -> ServerStats:
    zeros: dict[str, Any] = {each.name: 0 for each in dataclasses.fields(ServerStats)}
    zeros |= {
        "device_active_s": active_s,
        "device_gaps_s": MappingProxyType({"no_request": 5.0 * steps, "scheduler": bubble_s}),
        "bubble_counts": (steps,),
        "step_bounds_us": (1000, 2000, 4000),
        "step_token_counts": counts,
    }
    return ServerStats(**zeros)


def measured(
    *records: Record, before: ServerStats | None = None, after: ServerStats | None = None
) -> Measured:
    driven = Driven(list(records), array("d", [0.0, 0.001]), cpu_s=0.5, seconds=2.0)
    return Measured([driven], before, after)


def row(chosen: LoadOptions, what: Measured) -> dict[str, Any]:
    found = load_report.row_of(chosen, "m", batch(2, 3, 4, 10).requests, what)
    assert "ms" in load_table.table(found)  # every result can be shown
    return found


def test_a_piece_of_several_tokens_counts_as_evenly_spaced_ones() -> None:
    one = record((1.0, 2), (1.3, 3), (1.5, 1))
    assert load_report.inter_token_of([one]).tolist() == pytest.approx([0.1, 0.1, 0.1, 0.2])
    assert load_report.gaps_of([one]).tolist() == pytest.approx([0.3, 0.2])
    assert load_report.gaps_of([]).tolist() == []
    assert load_report.inter_token_of([record((1.0, 4))]).tolist() == []


def test_latencies_count_from_when_a_request_should_have_been_sent() -> None:
    """A generator that is late, as one is that waits for a slow server, does not hide it."""
    found = row(options(), measured(record((1.5, 1), sent_s=1.0, server_ttft_s=0.4, device_s=0.3)))
    assert found["ttft_ms"]["p99"] == found["request_ms"]["max"] == 1500.0
    assert found["generator"]["sent_late_ms"]["max"] == 1000.0
    assert found["added"]["ttft_ms"]["p50"] == pytest.approx(200.0)  # its own lateness aside
    assert found["added"]["ttft_ms_in_server"]["p50"] == pytest.approx(100.0)
    assert found["added"]["ttft_ms_in_transport"]["p50"] == pytest.approx(100.0)


def test_percentiles_lie_between_samples() -> None:
    records = [record((0.1 * k, 1)) for k in range(1, 12)]
    found = row(options(), measured(*records))["ttft_ms"]
    assert (found["p50"], found["p95"], found["p99"]) == (600.0, 1050.0, 1090.0)
    assert (found["mean"], found["max"]) == (600.0, 1100.0)


def test_goodput_wants_both_targets_and_counts_failures_among_all() -> None:
    good = record((0.1, 1), (0.2, 1), (0.5, 2))  # mean inter-token 133 ms, one gap of 300 ms
    late = record((0.3, 1), (0.4, 1))
    slow = record((0.1, 1), (0.5, 1))
    lost = record((0.1, 1), failure="UNAVAILABLE")
    short = record((0.2, 4))  # one piece meets any inter-token target
    everyone = [good, late, slow, lost, short]
    chosen = options("--target-ttft-ms", "200", "--target-itl-ms", "150")
    found = load_report.goodput(chosen, everyone, seconds=4.0)
    assert (found["share"], found["requests_per_s"]) == (0.4, 0.5)
    assert load_report.goodput(options(), everyone, 4.0)["share"] == 0.8
    only = options("--target-itl-ms", "150")
    assert load_report.goodput(only, everyone, 4.0)["share"] == pytest.approx(0.6)


def test_failures_are_counted_by_name_and_give_no_latency() -> None:
    refused = "RESOURCE_EXHAUSTED QUEUE_FULL"
    records = [
        record((1.0, 1), (2.0, 1)),
        record(failure=refused),
        record(failure=refused),
        record((0.5, 1), failure="OK CANCELLED"),
    ]
    found = row(options(), measured(*records))
    assert found["requests"] == {
        "sent": 4,
        "completed": 1,
        "failed": {refused: 2, "OK CANCELLED": 1},
    }
    assert found["ttft_ms"]["max"] == 1000.0
    assert found["tokens_per_s"] == 1.5  # tokens that came count, whatever became of the request
    assert found["requests_per_s"] == 0.5


def test_a_load_that_failed_as_a_whole_can_be_shown() -> None:
    found = row(options(), measured(record(failure="UNAVAILABLE DRAINING")))
    assert found["ttft_ms"] is found["gap_ms"] is found["added"]["gap_ms"] is None


def test_what_is_added_between_tokens_is_beyond_the_devices_steps() -> None:
    before = stats((7, 0, 0, 0), active_s=1.0, bubble_s=0.0, steps=10)
    after = stats((7, 80, 20, 0), active_s=2.0, bubble_s=0.25, steps=110)
    found = row(options(), measured(record((1.0, 1), (1.005, 1)), before=before, after=after))
    steps = found["added"]["device_step_ms"]
    assert steps == {"p50": 1.625, "p95": 3.5, "p99": 3.9, "mean": 1.8}
    assert found["added"]["gap_ms"] == {"p50": 3.375, "p95": 1.5, "p99": 1.1, "mean": 3.2}
    assert found["server"]["device_active"] == pytest.approx(0.8)  # idle without work is no bubble
    assert found["server"]["bubble_us_per_step"] == 2500.0


def test_a_server_that_was_not_asked_or_did_nothing_leaves_gaps_in_the_results() -> None:
    one = record((1.0, 1), (2.0, 1))
    assert row(options(), measured(one))["server"] is None
    idle = stats((1, 2, 3, 4), 1.0, 0.0, 5)
    found = row(options(), measured(one, before=idle, after=idle))
    assert found["added"]["device_step_ms"] is None
    assert found["server"]["bubble_us_per_step"] is None
