"""From a load to numbers: one object for the results, and one table for people.

Owns the arithmetic and the names in the results. Called by `load`.

How latencies are counted:

ttft            From the moment at which a request should have been sent (in a closed loop: was) to
                its first piece with tokens.
gap             Between two pieces of a request, whatever they carry.
inter-token     The same divided evenly: a piece of n tokens that comes d after the one before it
                counts as n times d / n. Tokens that come together with the first have none.
request         From the moment at which it should have been sent to the end of its stream.
goodput         Requests that completed with ttft and *mean* inter-token time within the targets; a
                share of all that were sent. A request of one piece meets any inter-token target.

What gateway and scheduler add (all that is not the device's own time, so the transport and the
reading of this generator as well; never less than the truth):

to ttft         Of each request, from when it was really sent: ttft less the time in which the
                device computed, for it or for others, between the moment at which the scheduler had
                it and its first token. A request that comes while a step runs waits for that step
                and, at depth 2, for the one behind it. The device works meanwhile, so this is not
                added; it is in the device's part, which is reported beside.
to inter-token  The percentile of the client's times less the same percentile of the device's own
                step times, each step weighted with the tokens (but first ones) that it gave, over
                the same time; read off a histogram, so true to 4 % of a step.
                Bubbles between steps are thus the server's, not the device's.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from gapless.bench.arrivals import Floats
from gapless.bench.calls import Record
from gapless.bench.generator import Driven
from gapless.bench.load_options import LoadOptions
from gapless.bench.work import Request
from gapless.client.values import ServerStats

PERCENTS: Final = (50, 95, 99)


@dataclasses.dataclass(frozen=True, slots=True)
class Measured:
    """What came out of a load."""

    driven: Sequence[Driven]
    before: ServerStats | None
    after: ServerStats | None

    @property
    def records(self) -> list[Record]:
        return [record for each in self.driven for record in each.records]


def row_of(
    chosen: LoadOptions, model: str, requests: Sequence[Request], measured: Measured
) -> dict[str, Any]:
    """The object of one load. Times are in the unit that ends their name."""
    records = measured.records
    done = [record for record in records if record.failure is None]
    begin_s = min(record.intended_s for record in records)
    seconds = max(record.ended_s for record in records) - begin_s
    tokens = sum(sum(record.piece_tokens) for record in records)
    gaps_s, shares_s = gaps_of(done), inter_token_of(done)
    return {
        "mode": "closed" if chosen.rate is None else "open",
        "work": {
            "model": model,
            "requests": len(requests),
            "prompt_tokens": sum(len(request.prompt) for request in requests),
            "new_tokens": sum(request.new_tokens for request in requests),
            "concurrency": chosen.concurrency,
            "ramp_s": chosen.ramp_s,
            "rate": chosen.rate,
            "seed": chosen.seed,
            "flush_interval_ms": chosen.flush_interval_ms,
            "text": chosen.text,
        },
        "seconds": round(seconds, 4),
        "requests": {
            "sent": len(records),
            "completed": len(done),
            "failed": dict(Counter(each.failure for each in records if each.failure is not None)),
        },
        "requests_per_s": round(len(done) / seconds, 3),
        "tokens_per_s": round(tokens / seconds, 1),
        "tokens_per_s_per_stream": _rate(shares_s),
        "tokens_per_piece": _mean([n for each in done for n in each.piece_tokens]),
        "ttft_ms": spread_ms(ttft_of(done)),
        "inter_token_ms": spread_ms(shares_s),
        "gap_ms": spread_ms(gaps_s),
        "request_ms": spread_ms(_column([each.ended_s - each.intended_s for each in done])),
        "goodput": goodput(chosen, records, seconds),
        "added": added(done, gaps_s, shares_s, measured),
        "generator": generator_row(measured),
        "server": server_row(measured),
    }


# ------------------------------------------------------------------ arithmetic


def ttft_of(records: Sequence[Record]) -> Floats:
    """In seconds, one a request."""
    return _column([each.piece_s[0] - each.intended_s for each in records])


def gaps_of(records: Sequence[Record]) -> Floats:
    """In seconds, one a piece but the first of a request."""
    return np.concatenate([np.empty(0), *(np.diff(np.array(each.piece_s)) for each in records)])


def inter_token_of(records: Sequence[Record]) -> Floats:
    """In seconds, one a token but those of the first piece of a request."""
    found = [np.empty(0)]
    for each in records:
        counts = np.array(each.piece_tokens)[1:]
        found.append(np.repeat(np.diff(np.array(each.piece_s)) / counts, counts))
    return np.concatenate(found)


def spread_ms(seconds: Floats) -> dict[str, float] | None:
    """Percentiles (linear between samples), mean and maximum; None of nothing."""
    if not len(seconds):
        return None
    values = {f"p{percent}": np.percentile(seconds, percent) for percent in PERCENTS}
    values |= {"mean": seconds.mean(), "max": seconds.max()}
    return {name: round(1e3 * float(value), 4) for name, value in values.items()}


def goodput(chosen: LoadOptions, records: Sequence[Record], seconds: float) -> dict[str, Any]:
    """Requests that met every target there is."""
    met = 0
    for each in records:
        if each.failure is not None:
            continue
        ttft_ms = 1e3 * (each.piece_s[0] - each.intended_s)
        later = sum(each.piece_tokens[1:])
        itl_ms = 1e3 * (each.piece_s[-1] - each.piece_s[0]) / later if later else 0.0
        targets = ((chosen.target_ttft_ms, ttft_ms), (chosen.target_itl_ms, itl_ms))
        met += all(target is None or value <= target for target, value in targets)
    return {
        "target_ttft_ms": chosen.target_ttft_ms,
        "target_itl_ms": chosen.target_itl_ms,
        "share": round(met / len(records), 6),
        "requests_per_s": round(met / seconds, 3),
    }


def added(
    done: Sequence[Record], gaps_s: Floats, shares_s: Floats, measured: Measured
) -> dict[str, Any]:
    """What gateway and scheduler add; see the module."""
    sent_ttft_s = _column([each.piece_s[0] - each.sent_s for each in done])
    device_s = _column([each.device_s for each in done])
    server_s = _column([each.server_ttft_s for each in done])
    step_ms = step_times_ms(measured)
    return {
        "ttft_ms": spread_ms(sent_ttft_s - device_s),
        "ttft_ms_in_server": spread_ms(server_s - device_s),
        "ttft_ms_in_transport": spread_ms(sent_ttft_s - server_s),
        "device_ms_before_first_token": spread_ms(device_s),
        "device_step_ms": step_ms,
        "inter_token_ms": _less(spread_ms(shares_s), step_ms),
        "gap_ms": _less(spread_ms(gaps_s), step_ms),
    }


def step_times_ms(measured: Measured) -> dict[str, float] | None:
    """The device's step times, weighted with tokens, from the server's histogram."""
    if measured.before is None or measured.after is None:
        return None
    bounds_us = measured.after.step_bounds_us
    before = measured.before.step_token_counts or (0,) * len(measured.after.step_token_counts)
    counts = np.array(measured.after.step_token_counts) - np.array(before)
    if not counts.sum():
        return None
    edges_us = np.array([0, *bounds_us, bounds_us[-1]])
    reached = np.concatenate([[0], np.cumsum(counts)])
    found = {
        f"p{percent}": float(np.interp(reached[-1] * percent / 100, reached, edges_us)) / 1e3
        for percent in PERCENTS
    }
    middles_us = (edges_us[:-1] + edges_us[1:]) / 2
    found["mean"] = float((counts * middles_us).sum() / counts.sum()) / 1e3
    return {name: round(value, 4) for name, value in found.items()}


def generator_row(measured: Measured) -> dict[str, Any]:
    """Whether the generator was up to it."""
    lag_s = _column([record.sent_s - record.intended_s for record in measured.records])
    lateness_s = np.concatenate([np.array(each.lateness_s) for each in measured.driven])
    return {
        "processes": len(measured.driven),
        "sent_late_ms": spread_ms(lag_s),
        "loop_late_ms": spread_ms(lateness_s),
        "busiest_process": round(max(each.cpu_s / each.seconds for each in measured.driven), 4),
    }


def server_row(measured: Measured) -> dict[str, Any] | None:
    """What the device did meanwhile; None if nobody was asked."""
    before, after = measured.before, measured.after
    if before is None or after is None:
        return None
    active_s = after.device_active_s - before.device_active_s
    gaps_s = {
        cause: gap_s - before.device_gaps_s[cause] for cause, gap_s in after.device_gaps_s.items()
    }
    bubbles_s = sum(gap_s for cause, gap_s in gaps_s.items() if cause != "no_request")
    steps = sum(after.bubble_counts) - sum(before.bubble_counts)
    work_s = active_s + bubbles_s
    return {
        "steps": steps,
        "device_active": round(active_s / work_s, 6) if work_s else None,
        "bubble_us_per_step": round(1e6 * bubbles_s / steps, 2) if steps else None,
        "gaps_s": {cause: round(gap_s, 6) for cause, gap_s in gaps_s.items()},
        "preemptions": after.preemptions_total - before.preemptions_total,
    }


def _column(values: Sequence[float]) -> Floats:
    return np.array(values, np.float64)


def _mean(values: Sequence[int]) -> float | None:
    return round(float(np.mean(values)), 3) if values else None


def _rate(seconds: Floats) -> float | None:
    return round(1 / float(seconds.mean()), 2) if len(seconds) and seconds.mean() else None


def _less(
    ours: dict[str, float] | None, theirs: dict[str, float] | None
) -> dict[str, float] | None:
    if ours is None or theirs is None:
        return None
    return {name: round(ours[name] - value, 4) for name, value in theirs.items()}
