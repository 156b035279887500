"""What a supervisor decides: which child starts and stops when, and with what exit code it ends.

A state machine without I/O: one input in, effects out, time as an argument. The only owner of who
runs; must not know how a process is started. Called by `supervisor`, alone.

::

              all ready
    STARTING ──────────▶ SERVING
        │                   │
        │  stop asked for, a child died, start took too long
        └───────┬───────────┘
                ▼     second stop
            STOPPING ───────────▶ KILLING
                │                    │
                └── no child left ───┴──▶ ENDED
"""

from __future__ import annotations

import enum
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, TypeAlias

EXIT_OK: Final = 0
EXIT_CHILD_DIED: Final = 4
EXIT_FORCED: Final = 130


class State(enum.Enum):
    """Of the whole."""

    STARTING = "starting"
    SERVING = "serving"
    STOPPING = "stopping"
    KILLING = "killing"
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class Plan:
    """The order of things. Each stage waits for the one before; its members run side by side."""

    start: tuple[tuple[str, ...], ...]
    stop: tuple[tuple[str, ...], ...]
    """The same names as in `start`, usually the other way round."""
    doing: Mapping[str, str]
    """Name → what it does until it is ready, for people: "loading weights"."""
    start_timeout_s: float
    """For each stage, from its start to the last ready."""
    stop_timeout_s: float
    """For each stage; then what still runs is killed."""

    def __post_init__(self) -> None:
        starts = sorted(name for stage in self.start for name in stage)
        stops = sorted(name for stage in self.stop for name in stage)
        assert starts == stops, f"{starts} start, but {stops} stop"
        assert len(set(starts)) == len(starts), f"a name twice in {starts}"


@dataclass(frozen=True, slots=True)
class ChildReady:
    """A child said that it is ready."""

    name: str
    line: str


@dataclass(frozen=True, slots=True)
class ChildExited:
    """A child was reaped."""

    name: str
    status: int
    """Exit status, or minus the number of the signal that killed it."""


@dataclass(frozen=True, slots=True)
class StopRequested:
    """Somebody wants it to end; a second request forces."""

    why: str


@dataclass(frozen=True, slots=True)
class SessionEnded:
    """What was to be done while serving is done."""


@dataclass(frozen=True, slots=True)
class DeadlinePassed:
    """The time of an earlier `SetDeadline` is over."""

    number: int


Input: TypeAlias = ChildReady | ChildExited | StopRequested | SessionEnded | DeadlinePassed


@dataclass(frozen=True, slots=True)
class Start:
    """Start this child."""

    name: str


@dataclass(frozen=True, slots=True)
class Terminate:
    """Ask this child to drain and end (SIGTERM)."""

    name: str


@dataclass(frozen=True, slots=True)
class Kill:
    """End this child and what it started (SIGKILL to its group)."""

    name: str


@dataclass(frozen=True, slots=True)
class Say:
    """Tell the person at the terminal."""

    text: str


@dataclass(frozen=True, slots=True)
class SetDeadline:
    """Send `DeadlinePassed(number)` after this time."""

    number: int
    after_s: float


@dataclass(frozen=True, slots=True)
class Serving:
    """All children are ready: name → the line that each wrote."""

    lines: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Ended:
    """No child is left."""

    exit_code: int


Effect: TypeAlias = Start | Terminate | Kill | Say | SetDeadline | Serving | Ended


class Supervision:
    """The state machine. `begin` once, then `step` with each input until `Ended` comes."""

    def __init__(self, plan: Plan) -> None:
        self.state = State.STARTING
        self._plan = plan
        self._stage = 0
        self._started_s: dict[str, float] = {}
        self._running: set[str] = set()
        self._ready: dict[str, str] = {}
        self._asked_to_stop: set[str] = set()
        self._deadline = 0
        self._exit_code = EXIT_OK

    def begin(self, now: float) -> list[Effect]:
        """Starts the first stage."""
        return self._start_stage(now)

    def step(self, given: Input, now: float) -> list[Effect]:
        """One input to its effects, in order."""
        assert self.state is not State.ENDED, f"{given} after the end"
        match given:
            case ChildReady(name, line):
                return self._on_ready(name, line, now)
            case ChildExited(name, status):
                return self._on_exit(name, status)
            case StopRequested(why):
                return self._on_stop(why)
            case SessionEnded():
                return self._stop() if self.state is State.SERVING else []
            case DeadlinePassed(number):
                return self._on_deadline() if number == self._deadline else []

    # ------------------------------------------------------------------ start

    def _start_stage(self, now: float) -> list[Effect]:
        effects: list[Effect] = []
        for name in self._plan.start[self._stage]:
            self._running.add(name)
            self._started_s[name] = now
            effects += [Say(f"{name}: {self._plan.doing[name]} ..."), Start(name)]
        return [*effects, self._new_deadline(self._plan.start_timeout_s)]

    def _on_ready(self, name: str, line: str, now: float) -> list[Effect]:
        if self.state is not State.STARTING or name in self._ready:
            return []
        self._ready[name] = line
        took_s = now - self._started_s[name]
        effects: list[Effect] = [Say(f"{name}: ready after {took_s:.1f} s")]
        if any(other not in self._ready for other in self._plan.start[self._stage]):
            return effects
        self._stage += 1
        if self._stage < len(self._plan.start):
            return effects + self._start_stage(now)
        self.state = State.SERVING
        self._deadline += 1
        return [*effects, Serving(dict(self._ready))]

    # ------------------------------------------------------------------- stop

    def _on_stop(self, why: str) -> list[Effect]:
        if self.state in (State.STARTING, State.SERVING):
            return [Say(f"{why}: stopping (once more to force)"), *self._stop()]
        if self.state is State.STOPPING:
            self.state = State.KILLING
            self._exit_code = EXIT_FORCED
            killed: list[Effect] = [Kill(name) for name in sorted(self._running)]
            return [Say(f"{why}: killing what still runs"), *killed]
        return []

    def _stop(self) -> list[Effect]:
        self.state = State.STOPPING
        self._stage = 0
        return self._stop_stage()

    def _stop_stage(self) -> list[Effect]:
        for stage in self._plan.stop[self._stage :]:
            names = [name for name in stage if name in self._running]
            if names:
                self._asked_to_stop.update(names)
                asked: list[Effect] = [Terminate(name) for name in names]
                return [*asked, self._new_deadline(self._plan.stop_timeout_s)]
            self._stage += 1
        return []

    def _on_exit(self, name: str, status: int) -> list[Effect]:
        self._running.remove(name)
        effects: list[Effect] = []
        if self._is_death(name, status):
            effects.append(Say(f"{name} {describe(status)}"))
            self._exit_code = EXIT_CHILD_DIED
        if self.state in (State.STARTING, State.SERVING):
            effects += self._stop()
        elif self.state is State.STOPPING:
            stage = self._plan.stop[self._stage]
            if not any(other in self._running for other in stage):
                effects += self._stop_stage()
        if not self._running:
            self.state = State.ENDED
            effects.append(Ended(self._exit_code))
        return effects

    def _is_death(self, name: str, status: int) -> bool:
        """Whether a child's end is worth a report."""
        if self.state is State.KILLING:
            return False
        if name not in self._asked_to_stop:
            return True
        # One that was not ready may know no better answer to SIGTERM.
        return status != 0 and not (name not in self._ready and status == -signal.SIGTERM)

    # -------------------------------------------------------------- deadlines

    def _new_deadline(self, after_s: float) -> SetDeadline:
        self._deadline += 1
        return SetDeadline(self._deadline, after_s)

    def _on_deadline(self) -> list[Effect]:
        if self.state is State.STARTING:
            late = [name for name in self._plan.start[self._stage] if name not in self._ready]
            self._exit_code = EXIT_CHILD_DIED
            said = f"{', '.join(late)}: not ready after {self._plan.start_timeout_s:g} s"
            return [Say(said), *self._stop()]
        if self.state is State.STOPPING:
            late = [name for name in self._plan.stop[self._stage] if name in self._running]
            killed: list[Effect] = [Kill(name) for name in late]
            said = f"{', '.join(late)}: not stopped after {self._plan.stop_timeout_s:g} s, killed"
            return [Say(said), *killed]
        return []


def describe(status: int) -> str:
    """An exit status in words."""
    if status < 0:
        return f"was killed by {signal.Signals(-status).name}"
    if status == 3:
        return "ended with exit status 3: it lost a process that it needs"
    return f"ended with exit status {status}"
