"""What a result says: tokens appended to their sequences, and who ends by them.

The stop rules for one token are `request.stop_of`; here they are asked only where the array form of
the same rules says that a row may end. Writes the seats' logs and lengths; ends nobody itself.
The core calls `take` once a result, before its fence opens.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from gapless.protos.messages import Vocabulary
from gapless.protos.seats import Int32s
from gapless.protos.slots import Result
from gapless.scheduler.pipeline import Flight
from gapless.scheduler.request import Sequence, Stop, stop_of
from gapless.scheduler.seats import Bools, Indices, Int64s, Seats, some
from gapless.scheduler.statistics import Work


class TokenTexts:
    """The bytes of every token, as stop strings see them."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._data = vocabulary.data
        self._ends: list[int] = np.frombuffer(vocabulary.ends, np.uint32).tolist()
        self._special = vocabulary.special
        assert len(self._ends) == len(self._special), (len(self._ends), len(self._special))

    def text(self, token: int, *, skip_special: bool) -> bytes:
        """Bytes of `token`; empty for a special one if those have no text, and for unknown ids."""
        if token >= len(self._ends) or (skip_special and self._special[token]):
            return b""
        return self._data[self._ends[token - 1] if token else 0 : self._ends[token]]


@dataclasses.dataclass(frozen=True, slots=True)
class Taken:
    """The news of one result. Columns ``[n]``: one token each for n live sequences."""

    gateways: Int64s
    handles: Int64s
    tokens: Int32s
    stopped: list[tuple[Sequence, Stop]]
    faulted: list[tuple[Sequence, int]]
    """Sequences whose row has no valid token, and the fault (see `RowFault`)."""


class Intake:
    """Takes results into the seats of one core."""

    def __init__(self, seats: Seats, vocab_size: int, work: Work) -> None:
        self._seats = seats
        self._work = work
        self._vocab_size = vocab_size
        self.texts: TokenTexts | None = None

    def take(self, flight: Flight, result: Result, now: float) -> Taken:
        """Takes the result of `flight`: acknowledges its positions and appends its tokens."""
        seats, tokens, faults = flight.seats, result.tokens, result.faults
        assert len(tokens) == len(faults) == len(seats), (len(tokens), len(seats))
        live, keep = self._seats.live[seats], flight.samples
        if np.count_nonzero(live) == len(seats):
            self._seats.acknowledged_length[seats] = flight.context_length
        else:
            # Surplus rows: their sequences have ended, their seats are fenced.
            self._seats.acknowledged_length[seats[live]] = flight.context_length[live]
            keep = live if keep is None else live & keep
        if keep is not None:
            seats, tokens, faults = seats[keep], tokens[keep], faults[keep]
        # As unsigned numbers, negative ids are out of the vocabulary as well.
        bad: Bools = (faults != 0) | (tokens.view(np.uint32) >= self._vocab_size)
        faulted: list[tuple[Sequence, int]] = []
        if some(bad):
            faulted = [
                (self._seats.sequence(seat), fault)
                for seat, fault in zip(seats[bad].tolist(), faults[bad].tolist(), strict=True)
            ]
            seats, tokens = seats[~bad], tokens[~bad]
        return self._append(seats, tokens, faulted, now)

    def _append(
        self, seats: Indices, tokens: Int32s, faulted: list[tuple[Sequence, int]], now: float
    ) -> Taken:
        columns = self._seats
        known = columns.known_length[seats]
        columns.log[seats, known] = tokens
        known += 1
        columns.known_length[seats] = known
        may_end = known >= columns.limit_length[seats]
        if columns.stop_width:
            stops = columns.stop_tokens[seats, : columns.stop_width] == tokens[:, None]
            may_end |= np.logical_or.reduce(stops, axis=1) & (known >= columns.min_length[seats])
        if columns.has_strings_count:
            may_end |= columns.has_strings[seats]
        if columns.awaits_first_count:
            for seat in seats[columns.awaits_first[seats]].tolist():
                sequence = columns.sequence(seat)
                sequence.first_token_s = now
                self._work.first_token(sequence)
                columns.token_seen(seat)
        stopped: list[tuple[Sequence, Stop]] = []
        if some(may_end):
            stopped = self._stopped(seats[may_end], tokens[may_end], known[may_end])
        return Taken(columns.gateway[seats], columns.handle[seats], tokens, stopped, faulted)

    def _stopped(
        self, seats: Indices, tokens: Int32s, known: Int32s
    ) -> list[tuple[Sequence, Stop]]:
        stopped = []
        for seat, token, known_length in zip(
            seats.tolist(), tokens.tolist(), known.tolist(), strict=True
        ):
            sequence = self._seats.sequence(seat)
            stop = stop_of(sequence, token, known_length, self.text_for(sequence, token))
            if stop is not None:
                stopped.append((sequence, stop))
        return stopped

    def text_for(self, sequence: Sequence, token: int) -> bytes:
        """The text of `token` that the sequence's stop strings see; empty if it has none."""
        if sequence.matcher is None:
            return b""
        assert self.texts is not None, "stop strings before the vocabulary"
        return self.texts.text(token, skip_special=sequence.stopping.skip_special_tokens)
