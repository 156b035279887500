"""Sections of the page of results about what is no race between systems: ``benchmarks/checks``.

Owns their texts and tables. Called by `plot`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

QUANTILES: Final = ("p50", "p95", "p99")

Row = dict[str, Any]


def stamps_section(found: dict[str, Any]) -> str:
    """How much of the time between a step's stamps some kernel ran, by torch's profiler."""
    lines = [
        "## Do the stamps tell the truth?",
        "",
        "A step counts as active from its first stamp to its last. torch's profiler says for how "
        f"much of that a kernel ran; {found['preset']}, {found['batch']} rows, {found['gpu']} "
        "([all numbers](checks/stamps.json), [kernels of a step](checks/kernels.md)):",
        "",
        "| load | steps | kernels | µs by stamps | µs a kernel ran | share |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for load in ("decode", "mixed"):
        for kind in ("decode_only", "with_prefill"):
            if values := found[load].get(kind):
                lines.append(
                    f"| {load}, {kind.replace('_', ' ')} | {values['steps']} "
                    f"| {values['kernels_per_step']:.0f} | {values['stamped_us']:,.0f} "
                    f"| {values['busy_us']:,.0f} | {values['busy_share_of_stamped']:.2%} |"
                )
    if remark := found.get("remark"):
        lines += ["", remark]
    return "\n".join([*lines, ""])


def loads_section(rows: Sequence[Row]) -> str:
    """What clients saw of a whole server under some loads (``gapless bench --server``)."""
    first = rows[0]
    lines = [
        "## Through the whole stack",
        "",
        f"`gapless bench --server`, clients on the same machine; {first['work']['model']}, "
        f"{first['gpu']}, run {first['run_id']}; ms at p50 / p95 / p99 "
        "([all numbers](checks/server.json)). *In the server* is what gateway and scheduler add to "
        "the time in which the device computes before a first token.",
        "",
        "| load | flush interval, ms | tokens/s | first token | in the server | between tokens "
        "| added there, p99 | gateway, µs of CPU a token |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        work, added = row["work"], row["added"]
        rate, at_once = work["rate"], work["concurrency"]
        load = f"{at_once} at once" if rate is None else f"{rate:.1f} a second, Poisson"
        spreads = [row["ttft_ms"], added["ttft_ms_in_server"], row["inter_token_ms"]]
        cells = [" / ".join(f"{spread[q]:.1f}" for q in QUANTILES) for spread in spreads]
        lines.append(
            f"| {load} | {work['flush_interval_ms']} | {row['tokens_per_s']:,.0f} | {cells[0]} "
            f"| {cells[1]} | {cells[2]} | {added['inter_token_ms']['p99']:.2f} "
            f"| {row['cpu_us_per_token']['gapless.gateway']:.0f} |"
        )
    return "\n".join([*lines, ""])


def capacity_section(rows: Sequence[Row]) -> str:
    """What one gateway process carries, by `gateway_capacity`."""
    first = rows[0]
    lines = [
        "## What one gateway process carries",
        "",
        "`python -m benchmarks.gateway_capacity`: a stand-in scheduler, "
        f"{first['streams']} streams that get a token each {first['step_ms']:g} ms, "
        f"{first['steps']:,} times; {first['processor']}, {first['cores']} cores for all. The "
        "gateway keeps up if the newest token of a delta is not longer on its way at the end than "
        "before ([all numbers](checks/gateway.json)).",
        "",
        "| flush interval, ms | tokens/s | cores | µs a token | tokens a delta "
        "| newest token, ms, p50 / p95 / p99 | in the last tenth | oldest token |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        spreads = ["newest_token_ms", "newest_token_ms_last_tenth", "oldest_token_ms"]
        cells = [" / ".join(f"{row[name][q]:.1f}" for q in QUANTILES) for name in spreads]
        lines.append(
            f"| {row['flush_interval_ms']} | {row['tokens_per_s']:,.0f} "
            f"| {row['gateway_cores']:.2f} | {row['gateway_us_per_token']:.0f} "
            f"| {row['tokens_per_delta']:.1f} | {cells[0]} | {cells[1]} | {cells[2]} |"
        )
    return "\n".join([*lines, ""])


SECTIONS: Final[Mapping[str, Callable[[Any], str]]] = {
    "stamps.json": stamps_section,
    "server.json": loads_section,
    "gateway.json": capacity_section,
}
"""By the file that each is made from, in the page's order."""
