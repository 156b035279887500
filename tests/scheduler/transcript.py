"""Runs a transcript: commands to a real core, and what they bring about, as text.

A transcript is a text file. A line that begins with ``> `` is a command; the lines below it, up to
a blank line, a comment or the next command, are its effects. Lines that begin with ``#`` explain.
The core checks its invariants after every command.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from gapless.protos.messages import (
    Cancel,
    CancelCause,
    Epoch,
    Failed,
    Finished,
    Handle,
    PrefillStarted,
    Vocabulary,
)
from gapless.protos.reasons import Reason
from gapless.protos.slots import NO_CARRY, Frame, RowFault
from gapless.scheduler.config import GatewayIndex
from gapless.scheduler.core import Core
from tests.scheduler.words import config, result_of, submit, tokens_of

COMMAND = "> "
CONFIG_NAMES = {
    "running": "running_max",
    "queued": "queued_max",
    "queued_tokens": "queued_tokens_max",
    "depth": "depth",
    "step_tokens": "step_tokens_max",
    "chunk": "chunk_tokens_max",
    "block_tokens": "block_tokens",
    "blocks": "block_count",
    "context": "context_length",
}
CLOCK_NAMES = {
    "queue_timeout": "queue_timeout_s",
    "deadline": "deadline_s",
    "time_limit": "time_limit_s",
}


def vocabulary() -> Vocabulary:
    """A hundred tokens; the text of token n is its number between angle brackets."""
    texts = [f"<{token}>".encode() for token in range(100)]
    ends = np.cumsum([len(text) for text in texts]).astype(np.uint32)
    return Vocabulary(b"".join(texts), ends.tobytes(), bytes(100))


def replay(text: str) -> str:
    """The transcript with the effects that its commands have now."""
    player = Player()
    lines: list[str] = []
    is_effect = False
    for line in text.splitlines():
        if line.startswith(COMMAND):
            lines += [line, *player.play(line.removeprefix(COMMAND))]
            is_effect = True
        elif not line.strip() or line.startswith("#"):
            lines.append(line)
            is_effect = False
        else:
            assert is_effect, f"neither command, effect nor comment: {line!r}"
    return "\n".join(lines) + "\n"


class Player:
    """One core and the frames its executor has not answered."""

    def __init__(self) -> None:
        self._commands: dict[str, Callable[[list[str], dict[str, str]], Iterator[str]]] = {
            "core": self._core,
            "submit": self._submit,
            "cancel": self._cancel,
            "cancel_by_id": self._cancel_by_id,
            "gateway_gone": self._gateway_gone,
            "build": self._build,
            "result": self._result,
            "late_result": self._late_result,
            "wait": self._wait,
            "preempt": self._preempt,
            "executor_lost": self._executor_lost,
            "memory_lost": self._memory_lost,
            "fail_all": self._fail_all,
            "drain": self._drain,
            "show": self._show,
        }
        self._now = 0.0
        self._frames: list[Frame] = []
        self._lost: list[Frame] = []

    def play(self, line: str) -> list[str]:
        """Runs a command; its effects, a line each."""
        name, *words = line.split()
        options = dict(word.split("=", 1) for word in words if "=" in word)
        effects = list(self._commands[name]([word for word in words if "=" not in word], options))
        self.core.check()
        return [*effects, *self._news()] or ["nothing"]

    # ------------------------------------------------------------------ commands

    def _core(self, words: list[str], options: dict[str, str]) -> Iterator[str]:
        changes = {CONFIG_NAMES[name]: int(value) for name, value in options.items()}
        self.core = Core(config(**changes), Epoch(1))
        self.core.set_vocabulary(vocabulary())
        yield f"{self.core.config.sequence_tokens_max} tokens fit a sequence"

    def _submit(self, words: list[str], options: dict[str, str]) -> Iterator[str]:
        yield from ()
        gateway = GatewayIndex(int(options.pop("gateway", "1")))
        prompt_tokens = int(options.pop("prompt", "5"))
        changes: dict[str, object] = {"max_new_tokens": int(options.pop("new", "4"))}
        for name, value in options.items():
            match name:
                case "min_new" | "priority":
                    changes["min_new_tokens" if name == "min_new" else name] = int(value)
                case "stop_tokens":
                    changes[name] = tuple(map(int, value.split(",")))
                case "stop_strings":
                    changes[name] = tuple(each.encode() for each in value.split(","))
                case "prior":
                    prior = np.array(value.split(","), np.int32)
                    changes[name] = (prior.tobytes(),)
                case "room":
                    changes["max_new_tokens_is_room"] = value == "yes"
                case "id" | "tenant":
                    changes["request_id" if name == "id" else name] = value
                case _:
                    changes[CLOCK_NAMES[name]] = float(value)
        self.core.submit(self._now, gateway, submit(int(words[0]), prompt_tokens, **changes))

    def _cancel(self, words: list[str], options: dict[str, str]) -> Iterator[str]:
        yield from ()
        gateway = GatewayIndex(int(options.get("gateway", "1")))
        handles = tuple(Handle(int(word)) for word in words)
        self.core.cancel(self._now, gateway, Cancel(handles, CancelCause.CLIENT))

    def _cancel_by_id(self, words: list[str], options: dict[str, str]) -> Iterator[str]:
        found = self.core.cancel_by_id(self._now, options.get("tenant", ""), tuple(words))
        yield f"were live: {' '.join(found) or 'none'}"

    def _gateway_gone(self, words: list[str], options: dict[str, str]) -> Iterator[str]:
        yield from ()
        self.core.gateway_gone(self._now, GatewayIndex(int(words[0])))

    def _build(self, words: list[str], options: dict[str, str]) -> Iterator[str]:
        if not self.core.can_build():
            yield "cannot build"
            return
        frame = self.core.build(self._now)
        if frame is None:
            yield "no row can run"
            return
        frame.check()
        self._frames.append(frame)
        yield f"step {frame.step} of epoch {frame.epoch}"
        rows = frame.rows
        for row in range(frame.row_count):
            end = int(rows.context_length[row])
            start = end - int(rows.query_length[row])
            carry = int(rows.carry_row[row])
            first = int(frame.token_ids[rows.query_start[row]])
            source = f"token {first}" if carry == NO_CARRY else f"carried from row {carry}"
            inputs = f"position {start}, {source}" if end - start == 1 else f"{start}..{end - 1}"
            sampled = f", samples {end}" if rows.result_count[row] else ""
            yield f"  row {row}: seat {rows.seat[row]}, {inputs}{sampled}"
        yield from self._table(frame)

    def _table(self, frame: Frame) -> Iterator[str]:
        """Assignments to block lists; those of sampling words are left out."""
        layout = self.core.config.seat_layout
        blocks: dict[int, list[tuple[int, int]]] = {}
        for seat, word, value in frame.assignments.tolist():
            if layout.blocks_at <= word < layout.bias_tokens_at:
                blocks.setdefault(seat, []).append((word - layout.blocks_at, value))
        for seat, places in blocks.items():
            listed = " ".join(f"{place}:{block}" for place, block in places)
            yield f"  table: seat {seat} blocks {listed}"

    def _result(self, words: list[str], options: dict[str, str]) -> Iterator[str]:
        """Options: token=N for all rows, sS=N for the row of seat S, fault=S for a fault there."""
        if not self._frames:
            yield "no step is in flight"
            return
        frame = self._frames.pop(0)
        result = result_of(frame, int(options.pop("token", "7")))
        for name, value in options.items():
            is_fault = name == "fault"
            seat = int(value) if is_fault else int(name.removeprefix("s"))
            row = frame.rows.seat.tolist().index(seat)
            if is_fault:
                result.faults[row] = RowFault.NOT_FINITE
            else:
                result.tokens[row] = int(value)
        yield f"result of step {frame.step}"
        self.core.result(self._now, result)

    def _late_result(self, words: list[str], options: dict[str, str]) -> Iterator[str]:
        frame = self._lost.pop(0)
        yield f"result of step {frame.step} of epoch {frame.epoch}"
        self.core.result(self._now, result_of(frame))

    def _wait(self, words: list[str], options: dict[str, str]) -> Iterator[str]:
        self._now += float(words[0])
        due = self.core.next_deadline()
        self.core.tick(self._now)
        yield f"now {self._now:g} s, next deadline was {'none' if due is None else f'{due:g} s'}"

    def _preempt(self, words: list[str], options: dict[str, str]) -> Iterator[str]:
        done = self.core.rewind(self._now, GatewayIndex(1), Handle(int(words[0])))
        yield "preempted" if done else "does not run"

    def _executor_lost(self, words: list[str], options: dict[str, str]) -> Iterator[str]:
        yield from self._lose(keep_kv=True)

    def _memory_lost(self, words: list[str], options: dict[str, str]) -> Iterator[str]:
        yield from self._lose(keep_kv=False)

    def _lose(self, *, keep_kv: bool) -> Iterator[str]:
        self._lost, self._frames = self._lost + self._frames, []
        self.core.rewind_all(self._now, Epoch(self.core.epoch + 1), keep_kv=keep_kv)
        yield f"epoch {self.core.epoch}"

    def _fail_all(self, words: list[str], options: dict[str, str]) -> Iterator[str]:
        yield from ()
        self.core.fail_all(self._now, Reason(words[0]), "gone")

    def _drain(self, words: list[str], options: dict[str, str]) -> Iterator[str]:
        yield from ()
        self.core.drain(self._now)

    def _show(self, words: list[str], options: dict[str, str]) -> Iterator[str]:
        stats = self.core.stats(self._now)
        yield (
            f"running {stats.running_requests}, waiting {stats.queued_requests} "
            f"({stats.queued_tokens} tokens), in flight {self.core.in_flight_count}"
        )
        yield (
            f"blocks free {stats.blocks_free}, active {stats.blocks_active}; "
            f"seats active {stats.seats_active}; preemptions {stats.preemptions_total}; "
            f"{'idle' if self.core.is_idle else 'live'}"
        )

    # ------------------------------------------------------------------ effects

    def _news(self) -> Iterator[str]:
        for gateway, update in sorted(self.core.take_updates().items()):
            for handle, token in tokens_of({gateway: update}):
                yield f"gateway {gateway}: {handle} token {token}"
            for event in update.events:
                yield f"gateway {gateway}: {event.handle} {_described(event)}"


def _described(event: object) -> str:
    match event:
        case PrefillStarted(queue_s=queue_s):
            return f"started after {queue_s:g} s"
        case Finished():
            details = {
                "stop_token": event.stop_token,
                "stop_string": event.stop_string_index,
                "preemptions": event.preemption_count or None,
            }
            named = [f"{name}={value}" for name, value in details.items() if value is not None]
            tokens = f"{event.completion_tokens} tokens"
            return ", ".join([f"finished {event.reason.name}", tokens, *named])
        case Failed():
            details_of = [f"{name}={value}" for name, value in event.metadata.items()]
            if event.retry_after_s is not None:
                details_of.append(f"retry_after={event.retry_after_s:g} s")
            return ", ".join([f"failed {event.reason.value}", *details_of])
    return "admitted"
