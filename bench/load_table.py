"""The results of a load as a table for people.

Owns its form; computes nothing. Called by `load`.
"""

from __future__ import annotations

from typing import Any, Final

COLUMNS: Final = ("p50", "p95", "p99", "mean", "max")
WIDTH: Final = 10
_SPREADS: Final = (
    ("time to first token", ("ttft_ms",)),
    ("inter-token", ("inter_token_ms",)),
    ("gap between pieces", ("gap_ms",)),
    ("whole request", ("request_ms",)),
    ("device: before a first token", ("added", "device_ms_before_first_token")),
    ("device: step", ("added", "device_step_ms")),
    ("added to first token", ("added", "ttft_ms")),
    ("  in the server", ("added", "ttft_ms_in_server")),
    ("  in transport and generator", ("added", "ttft_ms_in_transport")),
    ("added to inter-token", ("added", "inter_token_ms")),
    ("added to gap between pieces", ("added", "gap_ms")),
    ("generator: sent late", ("generator", "sent_late_ms")),
    ("generator: loop late", ("generator", "loop_late_ms")),
)


def table(row: dict[str, Any]) -> str:
    """A line of what was done, then latencies, then rates and counts."""
    label_width = max(len(label) for label, _ in _SPREADS)
    lines = [_work(row), f"{'ms':<{label_width}}" + "".join(f"{c:>{WIDTH}}" for c in COLUMNS)]
    for label, path in _SPREADS:
        spread: Any = row
        for name in path:
            spread = spread[name]
        cells = "".join(f"{_cell(spread, column):>{WIDTH}}" for column in COLUMNS)
        lines.append(f"{label:<{label_width}}{cells}")
    lines += [f"{label:<{label_width}}  {value}" for label, value in _facts(row)]
    return "\n".join(lines)


def _work(row: dict[str, Any]) -> str:
    work = row["work"]
    loop = (
        f"{work['concurrency']} at once"
        if row["mode"] == "closed"
        else f"{work['rate']:g} a second, Poisson"
    )
    flush = work["flush_interval_ms"]
    return (
        f"{work['model']}: {work['requests']} requests, {loop}, {work['prompt_tokens']} prompt and "
        f"{work['new_tokens']} new tokens, flush interval "
        f"{'as the server has it' if flush is None else f'{flush} ms'}: {row['seconds']:.2f} s"
    )


def _cell(spread: dict[str, float] | None, column: str) -> str:
    return "-" if spread is None or column not in spread else f"{spread[column]:,.2f}"


def _facts(row: dict[str, Any]) -> list[tuple[str, str]]:
    requests, goodput, generator = row["requests"], row["goodput"], row["generator"]
    failed = ", ".join(f"{count} {name}" for name, count in sorted(requests["failed"].items()))
    targets = " and ".join(
        f"{what} within {goodput[name]:g} ms"
        for what, name in (("first token", "target_ttft_ms"), ("tokens", "target_itl_ms"))
        if goodput[name] is not None
    )
    facts = [
        ("requests", f"{requests['completed']} of {requests['sent']} completed"),
        ("  failed", failed or "none"),
        ("requests/s", f"{row['requests_per_s']:,.2f}"),
        ("output tokens/s", f"{row['tokens_per_s']:,.1f}"),
        ("  of a stream", _number(row["tokens_per_s_per_stream"])),
        ("tokens a piece", _number(row["tokens_per_piece"])),
        (
            "goodput",
            f"{100 * goodput['share']:.2f} %, {goodput['requests_per_s']:,.2f} requests/s "
            f"({targets or 'no target'})",
        ),
        (
            "generator",
            f"{generator['processes']} processes, the busiest {generator['busiest_process']:.0%}",
        ),
    ]
    server = row["server"]
    if server is not None and server["device_active"] is not None:
        facts.append(
            (
                "device",
                f"{100 * server['device_active']:.2f} % active while there was work, "
                f"{_number(server['bubble_us_per_step'])} µs of bubble a step",
            )
        )
    return facts


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.2f}"
