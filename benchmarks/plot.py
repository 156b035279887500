"""Makes the page of results: ``python -m benchmarks.plot``.

Reads ``benchmarks/results/*.json`` (each a list of objects, one a run, or one object), the step
logs that they name in ``steps_file``, relative to their own file, and ``benchmarks/checks``; writes
``benchmarks/README.md``, ``benchmarks/plots/*.svg`` and the short table in the front page. A row
without a field shows a dash: other systems measure less.
"""

from __future__ import annotations

import argparse
import json
import re
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from benchmarks import check_sections, summary, svg
from gapless.bench import bubbles
from gapless.protos.bubbles import CAUSES
from gapless.protos.step_log import Steps, read_step_log

HERE: Final = Path(__file__).parent
POINTS: Final = 160
"""Of a line: medians of as many groups of steps."""
TIMELINE_STEPS: Final = 4
BORDER_BEFORE_US: Final = 200.0
BORDER_AFTER_US: Final = 500.0
MODE_COLOURS: Final = {"depth1": "#d1603d", "depth2": "#2f6db5"}
MODE_LABELS: Final = {"depth1": "depth 1 (synchronous)", "depth2": "depth 2"}
STEP_COLOURS: Final = ("#7fb069", "#a3c994")
CAUSE_COLOURS: Final = dict(zip(CAUSES, ("#eeeeee", "#d1603d", "#e6aa68", "#f2d974"), strict=True))
TAKE_COLOUR: Final = "#9b8bb4"
BUILD_COLOUR: Final = "#5b4b8a"
ACCEPT_COLOUR: Final = "#4f9da6"
LEGEND: Final = {
    "take result": TAKE_COLOUR,
    "build": BUILD_COLOUR,
    "accept": ACCEPT_COLOUR,
    "step": STEP_COLOURS[0],
    **{f"idle: {cause}": colour for cause, colour in CAUSE_COLOURS.items()},
}
COLUMNS: Final = (
    ("system", ("system",), ""),
    ("mode", ("mode",), ""),
    ("dtype", ("dtype",), ""),
    ("seconds", ("seconds",), ".1f"),
    ("tokens/s", ("tokens_per_s",), ",.0f"),
    ("ms a step, p50", ("ms_per_step_p50",), ".2f"),
    ("p99", ("ms_per_step_p99",), ".2f"),
    ("GPU active", ("gpu_active",), ".2%"),
    ("gap p50, µs", ("gap_us_p50",), ".1f"),
    ("gap p99, µs", ("gap_us_p99",), ".1f"),
    ("memory floor reached", ("floor_share",), ".0%"),
)
INTRODUCTION: Final = """\
# Benchmarks

One table a piece of work; all rows of a table were measured together on one machine. *Gap* is the
time between the end of a step on the device and the beginning of the next; *GPU active* is what the
gaps leave. *Memory floor reached* compares with the time in which the GPU can read the weights and
the keys and values that a step needs. Gaps come from stamps on the device.

Measure:

```
gapless bench --model preset:llama-8b --batch 32 --prompt 256 --new 8192 \\
    --json benchmarks/results/decode.json --raw benchmarks/results/decode
python -m benchmarks.cpu_peers    # on a CPU, in turns with transformers: the fastest run of each
make bench-page    # this page, from benchmarks/results
```
"""

Row = dict[str, Any]


def main(arguments: Sequence[str] | None = None) -> int:
    """Writes the page; exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plot", description=__doc__)
    parser.add_argument("--results", type=Path, default=HERE / "results")
    parser.add_argument("--page", type=Path, default=HERE / "README.md")
    parser.add_argument("--front", type=Path, default=HERE.parent / "README.md")
    chosen = parser.parse_args(arguments)
    if not chosen.results.is_dir():
        parser.error(f"{chosen.results} is no folder")
    write_page(chosen.results, chosen.page)
    write_front(chosen.results, chosen.page, chosen.front)
    print(f"wrote {chosen.page} and {chosen.front}")
    return 0


def write_page(results: Path, page: Path) -> None:
    """Writes the page and its pictures beside it."""
    groups = read_groups(results)
    parts = [INTRODUCTION]
    if not groups:
        parts.append("There are no results yet.\n")
    plots = page.parent / "plots"
    page.parent.mkdir(parents=True, exist_ok=True)
    for old in plots.glob("[0-9]*.svg"):
        old.unlink()
    for number, rows in enumerate(groups, 1):
        parts.append(section(rows))
        pictures = draw(rows)
        if pictures:
            plots.mkdir(parents=True, exist_ok=True)
        for name, text in pictures.items():
            path = plots / f"{number}-{_file_name(rows[0])}-{name}.svg"
            path.write_text(text)
            parts.append(f"![{name}]({path.relative_to(page.parent)})\n")
    for name, write in check_sections.SECTIONS.items():
        found = page.parent / "checks" / name
        if found.is_file():
            parts.append(write(json.loads(found.read_text())))
    page.write_text("\n".join(parts))


def write_front(results: Path, page: Path, front: Path) -> None:
    """Writes the short table between the marks of the front page, if there is anything to say."""
    works = summary.chosen(read_groups(results))
    if not works or not front.is_file():
        return
    plots = page.parent / "plots"
    plots.mkdir(parents=True, exist_ok=True)
    (plots / summary.PICTURE).write_text(summary.picture(works))
    table = summary.section(works, plots.relative_to(front.parent))
    front.write_text(summary.between_marks(front.read_text(), table))


def read_groups(results: Path) -> list[list[Row]]:
    """Rows that were measured together on the same work, in the order of the files."""
    groups: dict[str, list[Row]] = defaultdict(list)
    for path in sorted(results.glob("*.json")):
        found = json.loads(path.read_text())
        for row in found if isinstance(found, list) else [found]:
            if row.get("steps_file"):
                row["steps_file"] = path.parent / row["steps_file"]
            work = {name: value for name, value in row["work"].items() if name != "model"}
            groups[json.dumps([row["run_id"], work], sort_keys=True)].append(row)
    return list(groups.values())


def section(rows: Sequence[Row]) -> str:
    """Heading, machine and table of rows that belong together."""
    first = rows[0]
    versions = ", ".join(f"{name} {version}" for name, version in first["versions"].items())
    lines = [
        f"## {work_name(first)}",
        "",
        f"{first['gpu']}; run {first['run_id']}. {versions}.",
        "",
        "| " + " | ".join(label for label, _, _ in COLUMNS) + " |",
        "| " + " | ".join("---" for _ in COLUMNS) + " |",
    ]
    for row in rows:
        lines.append("| " + " | ".join(_cell(row, path, form) for _, path, form in COLUMNS) + " |")
    others = [row for row in rows if row["system"] != "gapless"]
    how = [f"- {_name(row)}: {row['command']}" for row in others if "command" in row]
    notes = [f"- {_name(row)}: {row['note']}" for row in rows if "note" in row]
    if how or notes:
        lines += ["", *how, *notes]
    return "\n".join([*lines, ""])


def _name(row: Row) -> str:
    return f"{row['system']} {row['mode']}"


def work_name(row: Row) -> str:
    """Such as ``preset:llama-8b, batch 32, prompt 256, new 8192``."""
    work = row["work"]
    others = (f"{name} {value}" for name, value in work.items() if name not in ("model", "name"))
    return ", ".join([str(work["model"]), *([work["name"]] if "name" in work else []), *others])


def _cell(row: Row, path: tuple[str, ...], form: str) -> str:
    value: Any = row
    for name in path:
        value = value.get(name) if isinstance(value, dict) else None
    return "-" if value is None else format(value, form)


def _file_name(row: Row) -> str:
    return re.sub(r"[^a-z0-9]+", "-", work_name(row).lower()).strip("-")


# ------------------------------------------------------------------ pictures


def draw(rows: Sequence[Row]) -> dict[str, str]:
    """Pictures of the runs whose step logs are there, one a mode."""
    logs: dict[str, Steps] = {}
    for row in rows:
        path = row.get("steps_file")
        if path is not None and row["mode"] in MODE_LABELS and path.is_file():
            logs.setdefault(row["mode"], read_step_log(path))
    logs = {mode: steps for mode, steps in logs.items() if len(steps) > TIMELINE_STEPS + 2}
    if not logs:
        return {}
    pictures = {"timeline": _timeline(logs), "border": _border(logs)}
    lines = [line for mode, steps in logs.items() if (line := _line(mode, steps)) is not None]
    if lines and "batch" in rows[0]["work"]:  # else the number of rows changes as well
        pictures["context"] = svg.line_plot(
            "Milliseconds a step, start to start, against context length",
            *("mean context of a row, tokens", "ms a step"),
            lines,
        )
    return pictures


def _line(mode: str, steps: Steps) -> svg.Line | None:
    """Medians over groups of steps of like context that only decode."""
    own = steps[1:]
    decodes = own["row_count"] == own["token_count"]
    pairs = np.flatnonzero(decodes[1:] & decodes[:-1])
    if not len(pairs):
        return None
    period_ms = np.diff(own["started_ns"])[pairs] / 1e6
    context = (own["context_tokens"] / own["row_count"])[pairs]
    order = np.argsort(context, kind="stable")
    context, period_ms = context[order], period_ms[order]
    points = [
        (float(np.median(context[group])), float(np.median(period_ms[group])))
        for group in np.array_split(np.arange(len(pairs)), min(POINTS, len(pairs)))
    ]
    return svg.Line(MODE_LABELS[mode], MODE_COLOURS[mode], tuple(points))


def _timeline(logs: dict[str, Steps]) -> str:
    """Some steps in the middle of each run, over the same length of time."""
    tracks: list[svg.Track] = []
    span_us = 0.0
    for mode in sorted(logs):
        middle = len(logs[mode]) // 2
        first = max(0, middle - 2)
        steps = logs[mode][first : first + TIMELINE_STEPS + 3]
        begin_ns = int(steps["started_ns"][1]) - 200_000
        end_ns = int(steps["finished_ns"][min(TIMELINE_STEPS, len(steps) - 1)])
        span_us = max(span_us, (end_ns - begin_ns) / 1e3)
        tracks.extend(_tracks(MODE_LABELS[mode], steps, begin_ns))
    return svg.timeline("A few steps of each mode", tracks, span_us, "µs", LEGEND)


def _border(logs: dict[str, Steps]) -> str:
    """The end of one step in the middle of each run, and what follows."""
    tracks: list[svg.Track] = []
    span_us = 0.0
    for mode in sorted(logs):
        middle = len(logs[mode]) // 2
        steps = logs[mode][max(0, middle - 3) : middle + 3]
        ended = min(3, len(steps) - 2)
        begin_ns = int(steps["finished_ns"][ended]) - int(1e3 * BORDER_BEFORE_US)
        next_us = (int(steps["started_ns"][ended + 1]) - begin_ns) / 1e3
        span_us = max(span_us, next_us + BORDER_AFTER_US)
        tracks.extend(_tracks(MODE_LABELS[mode], steps, begin_ns))
    return svg.timeline("From one step to the next, enlarged", tracks, span_us, "µs", LEGEND)


def _tracks(group: str, steps: Steps, begin_ns: int) -> list[svg.Track]:
    def bar(begin: int, end: int, colour: str, label: str) -> svg.Bar:
        return svg.Bar((begin - begin_ns) / 1e3, (end - begin_ns) / 1e3, colour, label)

    scheduler, executor, device = [], [], []
    accepted_before_ns = 0
    for each in steps:
        step, colour = int(each["step"]), STEP_COLOURS[int(each["step"]) % 2]
        scheduler.append(bar(each["received_ns"], each["taken_ns"], TAKE_COLOUR, f"take {step}"))
        built = (each["built_from_ns"], each["published_ns"])
        scheduler.append(bar(*built, BUILD_COLOUR, f"build {step}"))
        accept_from_ns = max(int(each["published_ns"]), accepted_before_ns)
        accepted_before_ns = int(each["accepted_ns"])
        executor.append(bar(accept_from_ns, accepted_before_ns, ACCEPT_COLOUR, f"accept {step}"))
        device.append(bar(each["started_ns"], each["finished_ns"], colour, f"step {step}"))
    gaps = bubbles.gaps_of(steps)
    for begin, parts in zip(gaps.begin_ns.tolist(), gaps.parts_ns.tolist(), strict=True):
        for cause, duration in zip(CAUSES, parts, strict=True):
            device.append(bar(begin, begin + duration, CAUSE_COLOURS[cause], cause))
            begin += duration
    return [
        svg.Track("scheduler", tuple(scheduler), group),
        svg.Track("executor", tuple(executor), group),
        svg.Track("device", tuple(device), group),
    ]


if __name__ == "__main__":
    raise SystemExit(main())
