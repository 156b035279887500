"""From plan to frame, and from frame to seat table."""

from __future__ import annotations

from gapless.protos.seats import Int32s


def apply_assignments(table: Int32s, assignments: Int32s) -> None:
    """Writes assignments, int32 ``[n, 3]`` of (seat, word, value), into a seat table.

    The shell applies each frame's to the shared table before it publishes the frame, so that the
    table always says what all frames so far have said. They are absolute: twice is harmless.
    """
    table[assignments[:, 0], assignments[:, 1]] = assignments[:, 2]
