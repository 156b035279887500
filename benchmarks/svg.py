"""Two kinds of pictures as SVG text: lines over two axes, and bars on tracks over time.

Owns how they look; a white ground, so that they can be read on any page. Called by `plot`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Final
from xml.sax.saxutils import escape

WIDTH: Final = 860
LEFT: Final = 96
RIGHT: Final = 20
TOP: Final = 34
BOTTOM: Final = 44
PLOT_HEIGHT: Final = 300
TRACK_HEIGHT: Final = 26
LEGEND_HEIGHT: Final = 22
GROUP_GAP: Final = 22
TICKS: Final = 6
FONT: Final = "font-family='sans-serif' font-size='12'"


@dataclasses.dataclass(frozen=True, slots=True)
class Line:
    """A line of a plot."""

    label: str
    colour: str
    points: tuple[tuple[float, float], ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Bar:
    """A piece of a track."""

    begin: float
    end: float
    colour: str
    label: str = ""
    """Shown if it fits, and under the pointer."""


@dataclasses.dataclass(frozen=True, slots=True)
class Track:
    """A named row of bars; a new group gets some room and a heading."""

    name: str
    bars: tuple[Bar, ...]
    group: str


def line_plot(title: str, x_label: str, y_label: str, lines: Sequence[Line]) -> str:
    """Lines over axes that begin at 0."""
    x_step = _tick_step(max(x for line in lines for x, _ in line.points))
    y_step = _tick_step(max(y for line in lines for _, y in line.points))
    x_max, y_max = TICKS * x_step, TICKS * y_step
    width, height = WIDTH - LEFT - RIGHT, PLOT_HEIGHT

    def at(x: float, y: float) -> str:
        return f"{LEFT + width * x / x_max:.1f},{TOP + height * (1 - y / y_max):.1f}"

    parts = [_text(LEFT, 18, title, weight="bold")]
    for k in range(TICKS + 1):
        share = k / TICKS
        x, y = LEFT + width * share, TOP + height * (1 - share)
        parts.append(_rule(LEFT, y, LEFT + width, y))
        parts.append(_text(LEFT - 8, y + 4, _number(k * y_step), anchor="end"))
        parts.append(_text(x, TOP + height + 16, _number(k * x_step), anchor="middle"))
    parts.append(_text(LEFT + width / 2, TOP + height + 36, x_label, anchor="middle"))
    parts.append(
        f"<text {FONT} text-anchor='middle' "
        f"transform='translate(24,{TOP + height / 2}) rotate(-90)'>{escape(y_label)}</text>"
    )
    for k, line in enumerate(lines):
        points = " ".join(at(x, y) for x, y in line.points)
        parts.append(
            f"<polyline points='{points}' fill='none' stroke='{line.colour}' stroke-width='2'/>"
        )
        parts.append(_box(LEFT + 12, TOP + 8 + 18 * k, 14, 10, line.colour, ""))
        parts.append(_text(LEFT + 32, TOP + 17 + 18 * k, line.label))
    return _picture(TOP + height + BOTTOM, parts)


def timeline(
    title: str, tracks: Sequence[Track], span: float, unit: str, legend: dict[str, str]
) -> str:
    """Tracks below each other, all over the time 0 .. `span`; `legend` tells colours by label."""
    width = WIDTH - LEFT - RIGHT
    parts = [_text(LEFT, 18, title, weight="bold")]
    y, group = float(TOP), ""
    for track in tracks:
        if track.group != group:
            group = track.group
            parts.append(_text(8, y + 14, group, weight="bold"))
            y += GROUP_GAP
        parts.append(_text(LEFT - 8, y + 17, track.name, anchor="end"))
        parts.append(_rule(LEFT, y + TRACK_HEIGHT, LEFT + width, y + TRACK_HEIGHT))
        for bar in track.bars:
            begin, end = max(bar.begin, 0.0), min(bar.end, span)
            if end <= begin:
                continue
            x, size = LEFT + width * begin / span, max(width * (end - begin) / span, 0.7)
            parts.append(_box(x, y + 3, size, TRACK_HEIGHT - 6, bar.colour, bar.label))
            if len(bar.label) * 7 < size:
                parts.append(_text(x + size / 2, y + 17, bar.label, anchor="middle"))
        y += TRACK_HEIGHT
    step = _tick_step(span)
    for k in range(int(span / step) + 1):
        parts.append(_text(LEFT + width * k * step / span, y + 16, _number(k * step), "middle"))
    parts.append(_text(LEFT + width / 2, y + 34, unit, anchor="middle"))
    x, y = float(LEFT), y + BOTTOM
    for label, colour in legend.items():
        size = 36 + 7 * len(label)
        if x + size > WIDTH:
            x, y = float(LEFT), y + LEGEND_HEIGHT
        parts.append(_box(x, y, 14, 10, colour, ""))
        parts.append(_text(x + 20, y + 9, label))
        x += size
    return _picture(y + LEGEND_HEIGHT, parts)


def _picture(height: float, parts: Sequence[str]) -> str:
    head = (
        f"<svg xmlns='http://www.w3.org/2000/svg' width='{WIDTH}' height='{height:.0f}' "
        f"viewBox='0 0 {WIDTH} {height:.0f}'>"
    )
    ground = f"<rect width='{WIDTH}' height='{height:.0f}' fill='white'/>"
    return "\n".join([head, ground, *parts, "</svg>", ""])


def _text(x: float, y: float, text: str, anchor: str = "start", weight: str = "normal") -> str:
    return (
        f"<text {FONT} x='{x:.1f}' y='{y:.1f}' text-anchor='{anchor}' "
        f"font-weight='{weight}'>{escape(text)}</text>"
    )


def _rule(x1: float, y1: float, x2: float, y2: float) -> str:
    ends = f"x1='{x1:.1f}' y1='{y1:.1f}' x2='{x2:.1f}' y2='{y2:.1f}'"
    return f"<line {ends} stroke='#dddddd'/>"


def _box(x: float, y: float, width: float, height: float, colour: str, label: str) -> str:
    place = f"x='{x:.1f}' y='{y:.1f}' width='{width:.1f}' height='{height:.1f}'"
    return f"<rect {place} fill='{colour}'><title>{escape(label)}</title></rect>"


def _number(value: float) -> str:
    """Without an exponent, thousands apart."""
    return f"{value:,.0f}" if value >= 100 else f"{value:g}"


def _tick_step(largest: float) -> float:
    """The distance of TICKS ticks that reach `largest`: 1, 2, 2.5 or 5 times a power of ten."""
    if largest <= 0:
        return 1.0
    least = largest / TICKS
    scale = 10.0 ** math.floor(math.log10(least))
    return next(each * scale for each in (1, 2, 2.5, 5, 10) if least <= each * scale * (1 + 1e-9))
