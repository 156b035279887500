"""A server's statistics, written out: lines for people, or one JSON object.

Owns their form. Totals of the device's time become shares of the time since start or, where there
is one, since the snapshot before. Called by `commands`.
"""

from __future__ import annotations

import dataclasses
import itertools
import json

from gapless.client.values import ServerStats


def as_json(stats: ServerStats, before: ServerStats | None) -> str:
    """One line with all values, totals since start."""
    del before
    fields = {field.name: getattr(stats, field.name) for field in dataclasses.fields(stats)}
    return json.dumps({**fields, "device_gaps_s": dict(stats.device_gaps_s)}) + "\n"


def as_text(stats: ServerStats, before: ServerStats | None) -> str:
    """Some lines, and an empty one between two snapshots."""
    lines = [
        ("state", stats.state),
        (
            "requests",
            f"{stats.running_requests} running, {stats.queued_requests} queued, "
            f"{stats.open_streams} streams open",
        ),
        (
            "  in all",
            f"{stats.requests_total}: {stats.requests_rejected_total} rejected, "
            f"{stats.requests_failed_total} failed, {stats.requests_cancelled_total} cancelled",
        ),
        (
            "tokens",
            f"{stats.generated_tokens_per_second:.1f} a second; in all "
            f"{stats.generated_tokens_total} generated, {stats.prompt_tokens_total} of prompts",
        ),
        (
            "KV blocks",
            f"{stats.kv_blocks_active} in use, {stats.kv_blocks_free} free; "
            f"{stats.preemptions_total} preemptions",
        ),
        ("device", _shares(stats, before)),
        ("bubbles", _percentiles(stats, before)),
    ]
    text = "".join(f"{label:<10} {value}\n" for label, value in lines)
    return text if before is None else f"\n{text}"


def _shares(stats: ServerStats, before: ServerStats | None) -> str:
    active_s = stats.device_active_s - (before.device_active_s if before is not None else 0.0)
    gaps_s = {
        cause: total_s - (before.device_gaps_s[cause] if before is not None else 0.0)
        for cause, total_s in stats.device_gaps_s.items()
    }
    span_s = active_s + sum(gaps_s.values())
    if span_s <= 0:
        return "no step"
    share = {
        cause: f"{cause.replace('_', ' ')} {gap_s / span_s:.2%}" for cause, gap_s in gaps_s.items()
    }
    idle = share.pop("no_request")
    line = f"{active_s / span_s:.2%} active; {idle}; bubbles: {', '.join(share.values())}"
    return line.replace("%", " %")


def _percentiles(stats: ServerStats, before: ServerStats | None) -> str:
    counts = list(stats.bubble_counts)
    if before is not None and before.bubble_counts:
        counts = [now - then for now, then in zip(counts, before.bubble_counts, strict=True)]
    if not sum(counts):
        return "no step"
    return ", ".join(f"p{percent} {_percentile(stats, counts, percent)}" for percent in (50, 99))


def _percentile(stats: ServerStats, counts: list[int], percent: int) -> str:
    """The bucket in which it lies."""
    wanted = sum(counts) * percent / 100
    bucket = next(k for k, count in enumerate(itertools.accumulate(counts)) if count >= wanted)
    bounds = stats.bubble_bounds_us
    return f"at most {bounds[bucket]} µs" if bucket < len(bounds) else f"more than {bounds[-1]} µs"
