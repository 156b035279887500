"""The short table and the picture in the front page: one server beside another, same work.

Owns what is chosen from the results: of each work the run in which most systems were measured
together, the newest of those. Called by `plot`, which writes both between two marks of README.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from benchmarks import svg

BEGIN: Final = "<!-- measured: made by python -m benchmarks.plot -->"
END: Final = "<!-- /measured -->"
PICTURE: Final = "systems.svg"
SYSTEMS: Final = {
    "gapless": ("Gapless", "depth2", "#2f6db5"),
    "vllm": ("vLLM", "async", "#8f8f8f"),
    "transformers": ("transformers", "async", "#d1a33d"),
}
"""Of each system its name, the mode that is its fastest, and a colour."""

Row = dict[str, Any]


def chosen(groups: Sequence[Sequence[Row]]) -> list[dict[str, Row]]:
    """For each work that more than one system did, the rows by system, in a fixed order."""
    best: dict[str, dict[str, Row]] = {}
    for rows in groups:
        found = {
            row["system"]: row
            for row in rows
            if row["system"] in SYSTEMS
            and row["mode"] == SYSTEMS[row["system"]][1]
            and row.get("gpu")
        }
        if "gapless" not in found or len(found) < 2:
            continue
        work = work_label(found["gapless"])
        rank = len(found), found["gapless"]["run_id"]
        if work not in best or rank > (len(best[work]), best[work]["gapless"]["run_id"]):
            best[work] = found
    return [best[work] for work in sorted(best, key=lambda work: _order(best[work]["gapless"]))]


def _order(row: Row) -> tuple[bool, int, int]:
    work = row["work"]
    return "name" in work, work.get("batch", 0), work.get("new", 0)


def work_label(row: Row) -> str:
    """Such as ``32 requests, 256 + 8,192 tokens``."""
    work = row["work"]
    if "name" in work:
        return f"{work['requests']:,} requests of mixed sizes, {work['running']} at once"
    requests = "1 request" if work["batch"] == 1 else f"{work['batch']} requests"
    return f"{requests}, {work['prompt']} + {work['new']:,} tokens"


def section(works: Sequence[dict[str, Row]], plots: Path) -> str:
    """The table, and the link to the picture; `plots` as seen from the page."""
    systems = [system for system in SYSTEMS if any(system in rows for rows in works)]
    labels = [f"{SYSTEMS[system][0]}{_version(works, system)}" for system in systems]
    first = works[0]["gapless"]
    runs = {row["run_id"] for rows in works for row in rows.values()}
    lines = [
        f"One {first['gpu']}, {first['work']['model'].removeprefix('preset:')} architecture with "
        "random weights, bf16, greedy; output tokens a second, milliseconds a step. "
        + ("All of it" if len(runs) == 1 else "What stands in one row")
        + " was measured in one run on one machine:",
        "",
        "| work | " + " | ".join(labels) + " |",
        "| --- |" + " ---: |" * len(labels),
    ]
    for rows in works:
        cells = [_cell(rows.get(system)) for system in systems]
        lines.append(f"| {work_label(rows['gapless'])} | " + " | ".join(cells) + " |")
    for rows in works:
        for system in systems:
            if note := rows.get(system, {}).get("note"):
                lines += ["", f"{SYSTEMS[system][0]} at {work_label(rows['gapless'])}: {note}."]
    return "\n".join([*lines, "", f"![tokens a second]({plots / PICTURE})"])


def _version(works: Sequence[dict[str, Row]], system: str) -> str:
    versions = {rows[system]["versions"].get(system) for rows in works if system in rows}
    version = versions.pop() if len(versions) == 1 else None
    return "" if version is None or system == "gapless" else f" {version}"


def _cell(row: Row | None) -> str:
    if row is None:
        return "-"
    step = row.get("ms_per_step_p50")
    shown = f"{row['tokens_per_s']:,.0f}"
    return shown if step is None or "name" in row["work"] else f"{shown} ({step:.2f} ms)"


def picture(works: Sequence[dict[str, Row]]) -> str:
    """Throughput of each system as a share of the fastest's, work by work."""
    tracks = []
    for rows in works:
        most = max(row["tokens_per_s"] for row in rows.values())
        for system, (name, _, colour) in SYSTEMS.items():
            if system in rows:
                share = 100 * rows[system]["tokens_per_s"] / most
                label = f"{rows[system]['tokens_per_s']:,.0f} tokens/s"
                bar = svg.Bar(0.0, share, colour, label)
                tracks.append(svg.Track(name, (bar,), work_label(rows["gapless"])))
    return svg.timeline("Output tokens a second", tracks, 100.0, "% of the fastest", {})


def between_marks(page: str, text: str) -> str:
    """`page` with `text` between the marks; as it was if it has none."""
    begin, end = page.find(BEGIN), page.find(END)
    if begin < 0 or end < begin:
        return page
    return f"{page[: begin + len(BEGIN)]}\n{text}\n{page[end:]}"
