"""From measured runs to numbers: one object a run for the results, and one table for people.

Owns the names in the results. Called by `__main__`.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from gapless.bench import bubbles
from gapless.bench.measure import DepthRuns, Run
from gapless.bench.options import Options
from gapless.bench.sizes import DTYPE_BYTES, Model
from gapless.bench.work import Tokens, Work
from gapless.protos.bubbles import CAUSES
from gapless.protos.step_log import Steps

ATTENTION: Final = re.compile(r"attention: ([^;\n]+)")
READY: Final = re.compile(r"ready after [0-9.]+ s: (.+)")
PEAK_MEMORY: Final = re.compile(r"peak (?:device|GPU) memory:? ([0-9.]+) (MiB|GiB)")
_FIELD_OF: Final = {cause: cause.replace(" ", "_") for cause in CAUSES}


@dataclasses.dataclass(frozen=True, slots=True)
class Origin:
    """What all rows of one call have in their names."""

    system: str
    command: str
    run_id: str
    versions: dict[str, str]
    gpu: str


def row_of(
    origin: Origin, options: Options, model: Model, work: Work, runs: DepthRuns, run: Run
) -> dict[str, Any]:
    """The object of one run. Times are in the unit that ends their name."""
    steps, facts = run.steps, runs.facts
    own = steps[1:]
    gaps = bubbles.gaps_of(steps)
    busy_ns = int((own["finished_ns"] - own["started_ns"]).sum())
    span_ns = busy_ns + int(gaps.total_ns.sum())
    period_ns = bubbles.decode_periods_ns(steps)
    decode = own[own["row_count"] == own["token_count"]]
    lost_ns = dict(zip(_FIELD_OF.values(), gaps.parts_ns.sum(axis=0).tolist(), strict=True))
    cpu_us = {name: round(1e6 * spent / len(own), 1) for name, spent in run.cpu_s.items()}
    return {
        "system": origin.system,
        "mode": f"depth{run.depth}",
        "work": {"model": model.name, **work.fields},
        "seconds": round(run.seconds, 4),
        "ms_per_step_p50": _percentile(period_ns, 50, 1e6),
        "ms_per_step_p99": _percentile(period_ns, 99, 1e6),
        "regular_share": bubbles.regular_share(period_ns),
        "gpu_active": round(busy_ns / span_ns, 6),
        "tokens_per_s": round(work.new_tokens / run.seconds, 1),
        "step_count": len(own),
        "decode_step_count": len(decode),
        "device_ms_p50": _percentile(decode["finished_ns"] - decode["started_ns"], 50, 1e6),
        "device_ms_p99": _percentile(decode["finished_ns"] - decode["started_ns"], 99, 1e6),
        "gap_us_p50": _percentile(gaps.total_ns, 50, 1e3),
        "gap_us_p99": _percentile(gaps.total_ns, 99, 1e3),
        "gap_us_max": _percentile(gaps.total_ns, 100, 1e3),
        "bubble_ms": {name: round(ns / 1e6, 3) for name, ns in lost_ns.items()},
        "bubble_share": {name: round(ns / span_ns, 6) for name, ns in lost_ns.items()},
        "host_us": (host_us := _host_us(steps, run.depth)),
        "host_path_us": _sum_of_medians(host_us),
        "cpu_s": {name: round(spent, 3) for name, spent in run.cpu_s.items()},
        "cpu_us_per_step": cpu_us,
        "peak_resident_bytes": runs.peak_resident_bytes,
        "device_memory_bytes": _peak_memory(runs.executor_log) or runs.device_memory_bytes,
        **_floor(options, model, facts.device, facts.dtype, decode, period_ns),
        "clock_drift_ppm": round(run.clock_drift_ppm, 3),
        "preemption_count": run.preemption_count,
        "start_s": round(runs.start_s, 2),
        "start_phases_s": start_phases_s(runs.executor_log),
        "device": facts.device,
        "dtype": facts.dtype,
        "attention": _attention(runs.executor_log),
        "gpu": origin.gpu,
        "versions": origin.versions,
        "command": origin.command,
        "run_id": origin.run_id,
        "steps_file": _steps_file(options, run),
    }


def _host_us(steps: Steps, depth: int) -> dict[str, dict[str, float | None]]:
    path = bubbles.host_path(steps, depth)
    parts = {
        "wake": path.wake_ns,
        "take_result": path.take_ns,
        "build_and_publish": path.build_ns,
        "border": path.border_ns,
        "launch": path.launch_ns,
    }
    return {
        name: {"p50": _percentile(ns, 50, 1e3), "p99": _percentile(ns, 99, 1e3)}
        for name, ns in parts.items()
    }


def _sum_of_medians(host_us: dict[str, dict[str, float | None]]) -> float | None:
    """The whole way from the end of a step to the beginning of the one that its result admits.

    At depth 1 the device waits for all of it, at depth 2 for none as long as a step is longer.
    None if a part was never seen alone, such as a launch that always found the device busy.
    """
    medians = [part["p50"] for part in host_us.values()]
    seen = [median for median in medians if median is not None]
    return round(sum(seen), 1) if len(seen) == len(medians) else None


def _floor(
    options: Options,
    model: Model,
    device: str,
    dtype: str,
    decode: Steps,
    period_ns: npt.NDArray[np.int64],
) -> dict[str, float | None]:
    """The least time in which the steps that decode could have read weights and KV."""
    if model.shape is None or not device.startswith("cuda") or not len(period_ns):
        return {"floor_ms_per_step": None, "floor_share": None}
    values = model.shape.weights_read + model.shape.kv_values * decode["context_tokens"].mean()
    floor_ms = 1e3 * values * DTYPE_BYTES[dtype] / (1e12 * options.read_bandwidth_tb_s)
    share = floor_ms / (period_ns.mean() / 1e6)
    return {"floor_ms_per_step": round(floor_ms, 4), "floor_share": round(float(share), 4)}


def _percentile(ns: npt.NDArray[np.int64], percent: float, unit_ns: float) -> float | None:
    return round(float(np.percentile(ns, percent)) / unit_ns, 4) if len(ns) else None


def _steps_file(options: Options, run: Run) -> str | None:
    """As seen from the file of the results."""
    if options.json is None or run.steps_file is None:
        return None
    return os.path.relpath(run.steps_file, options.json.parent)


def _attention(executor_log: str) -> str | None:
    found = ATTENTION.search(executor_log)
    return found.group(1).strip() if found else None


def start_phases_s(executor_log: str) -> dict[str, float]:
    """How long each part of the executor's start took."""
    found = READY.search(executor_log)
    parts = found.group(1).split(", ") if found else []
    return {name: float(seconds) for name, _, seconds in (part.rpartition(" ") for part in parts)}


def _peak_memory(executor_log: str) -> int | None:
    found = PEAK_MEMORY.search(executor_log)
    if found is None:
        return None
    return int(float(found.group(1)) * (1 << (30 if found.group(2) == "GiB" else 20)))


def difference(reference: Run, other: Run) -> tuple[int, int | None]:
    """How many requests got equal tokens in both runs, and the first that did not."""
    equal = [np.array_equal(a, b) for a, b in zip(reference.tokens, other.tokens, strict=True)]
    return sum(equal), equal.index(False) if not all(equal) else None


def first_difference(a: Tokens, b: Tokens) -> int:
    """Where two equally long token logs first differ."""
    return int(np.flatnonzero(a != b)[0])


# ------------------------------------------------------------------ for people


def table(rows: Sequence[dict[str, Any]]) -> str:
    """One column a run."""
    lines = [("", [row["mode"] for row in rows])]
    for label, path, form in _lines(rows[0]):
        lines.append((label, [_shown(row, path, form) for row in rows]))
    label_width = max(len(label) for label, _ in lines)
    widths = [max(len(cells[k]) for _, cells in lines) for k in range(len(rows))]
    return "\n".join(
        f"{label:<{label_width}}"
        + "".join(f"   {cell:>{width}}" for cell, width in zip(cells, widths, strict=True))
        for label, cells in lines
    )


def _lines(row: dict[str, Any]) -> list[tuple[str, tuple[str, ...], str]]:
    """Label, where the value stands, how it is shown. ``%`` is a share."""
    lines: list[tuple[str, tuple[str, ...], str]] = [
        ("seconds", ("seconds",), ".2f"),
        ("tokens/s", ("tokens_per_s",), ",.0f"),
        ("steps", ("step_count",), ",d"),
        ("ms a decode step, start to start, p50", ("ms_per_step_p50",), ".3f"),
        ("  p99", ("ms_per_step_p99",), ".3f"),
        ("  within 1.1 × the median of 100 neighbours", ("regular_share",), "%"),
        ("ms a decode step on the device, p50", ("device_ms_p50",), ".3f"),
        ("  p99", ("device_ms_p99",), ".3f"),
        ("memory floor, ms a decode step", ("floor_ms_per_step",), ".3f"),
        ("  share reached", ("floor_share",), "%"),
        ("device active", ("gpu_active",), "%"),
        ("gap between steps, µs, p50", ("gap_us_p50",), ",.1f"),
        ("  p99", ("gap_us_p99",), ",.1f"),
        ("  max", ("gap_us_max",), ",.1f"),
    ]
    for cause, name in _FIELD_OF.items():
        lines.append((f"device idle: {cause}, ms", ("bubble_ms", name), ",.2f"))
        lines.append(("  share of the time", ("bubble_share", name), "%"))
    for part in row["host_us"]:
        label = part.replace("_", " ")
        lines.append((f"host, µs: {label}, p50", ("host_us", part, "p50"), ",.1f"))
        lines.append(("  p99", ("host_us", part, "p99"), ",.1f"))
    lines.append(("host, µs: all, sum of p50", ("host_path_us",), ",.1f"))
    for name in row["cpu_us_per_step"]:
        lines.append((f"processor time, µs a step: {name}", ("cpu_us_per_step", name), ",.1f"))
    for name in row["peak_resident_bytes"]:
        lines.append((f"peak memory, GiB: {name}", ("peak_resident_bytes", name), "GiB"))
    lines.append(("device memory in use, GiB", ("device_memory_bytes",), "GiB"))
    lines.append(("start, s: scheduler and executor", ("start_s",), ".2f"))
    for name in row["start_phases_s"]:
        lines.append((f"  executor: {name}", ("start_phases_s", name), ".2f"))
    lines.append(("clock drift corrected, millionths", ("clock_drift_ppm",), ".2f"))
    lines.append(("preemptions", ("preemption_count",), ",d"))
    lines.append(("attention", ("attention",), ""))
    return lines


def _shown(row: dict[str, Any], path: tuple[str, ...], form: str) -> str:
    value: Any = row
    for name in path:
        value = value[name]
    if value is None:
        return "-"
    if form == "%":
        return f"{100 * value:.2f} %"
    if form == "GiB":
        return f"{value / 2**30:.2f}"
    return format(value, form)
