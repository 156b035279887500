"""What the gateways heard, and whether it is what they should have heard."""

from __future__ import annotations

import collections
import dataclasses

import numpy as np

from gapless.protos.messages import (
    Admitted,
    Failed,
    Finished,
    FinishReason,
    Handle,
    PrefillStarted,
    Submit,
    Update,
)
from gapless.protos.reasons import Reason
from gapless.scheduler.config import GatewayIndex
from tests.simulation.model import continuation

REFUSALS = {Reason.QUEUE_FULL, Reason.REQUEST_ID_IN_USE, Reason.KV_CAPACITY_EXCEEDED}
FAILURES = {Reason.QUEUE_TIMEOUT, Reason.DEADLINE, Reason.ENGINE_ERROR}
OUTSIDE_REASONS = {FinishReason.CANCELLED, FinishReason.TIME_LIMIT}


@dataclasses.dataclass(slots=True)
class _Account:
    gateway: GatewayIndex
    word: Submit
    is_admitted: bool = False
    is_forgotten: bool = False
    started_count: int = 0
    terminal: Finished | Failed | None = None


class Ledger:
    """One account a request; tokens are booked in bulk and split at the end."""

    def __init__(self, sequence_tokens_max: int) -> None:
        self._sequence_tokens_max = sequence_tokens_max
        self._accounts: dict[Handle, _Account] = {}
        self._handles: list[bytes] = []
        self._tokens: list[bytes] = []
        self.outcomes: collections.Counter[str] = collections.Counter()

    def expect(self, gateway: GatewayIndex, word: Submit) -> None:
        """A request is about to be submitted."""
        self._accounts[word.handle] = _Account(gateway, word)

    def forget(self, gateway: GatewayIndex) -> None:
        """A gateway is gone: whatever it has not heard yet, it never will."""
        for account in self._accounts.values():
            if account.gateway == gateway and account.terminal is None:
                account.is_forgotten = True

    def record(self, updates: dict[GatewayIndex, Update]) -> None:
        """Books updates: tokens first, then the events in order."""
        for gateway, update in updates.items():
            assert 2 * len(update.tokens) == len(update.handles), "a token without a handle"
            self._handles.append(update.handles)
            self._tokens.append(update.tokens)
            for event in update.events:
                account = self._accounts[event.handle]
                assert account.gateway == gateway, "news for another gateway"
                assert not account.is_forgotten, "news for a gateway that is gone"
                assert account.terminal is None, f"{event} after {account.terminal}"
                if isinstance(event, Admitted):
                    assert not account.is_admitted, "admitted twice"
                    account.is_admitted = True
                elif isinstance(event, PrefillStarted):
                    assert account.is_admitted, "started before it was admitted"
                    account.started_count += 1
                else:
                    account.terminal = event

    def judge(self) -> None:
        """Every request ended once, rightly, with the tokens it has alone."""
        handles = np.frombuffer(b"".join(self._handles), np.int64)
        tokens = np.frombuffer(b"".join(self._tokens), np.int32)
        order = np.argsort(handles, kind="stable")
        handles, tokens = handles[order], tokens[order]
        for handle, account in self._accounts.items():
            span = slice(*np.searchsorted(handles, [handle, handle + 1]).tolist())
            self._judge(handle, account, tuple(tokens[span].tolist()))

    def _judge(self, handle: Handle, account: _Account, tokens: tuple[int, ...]) -> None:
        terminal, word = account.terminal, account.word
        if account.is_forgotten:
            self.outcomes["FORGOTTEN"] += 1
            assert terminal is None, terminal
        else:
            assert terminal is not None, f"handle {handle} never ended"
            self.outcomes[terminal.reason.name] += 1
        if isinstance(terminal, Failed):
            assert terminal.reason in (FAILURES if account.is_admitted else REFUSALS), terminal
            if not account.is_admitted:
                assert not tokens, f"handle {handle} was refused and has tokens"
                return
        assert account.started_count <= 1, "started twice"
        prompt = np.frombuffer(word.prompt, np.int32).tolist()
        expected = continuation(
            prompt, word.sampling.seed, word.stopping, self._sequence_tokens_max
        )
        same = expected.tokens[: len(tokens)] == tokens
        assert same, f"handle {handle}: {tokens} is not {expected.tokens[: len(tokens)]}"
        if not isinstance(terminal, Finished):
            return
        assert terminal.completion_tokens == len(tokens), (terminal, len(tokens))
        if terminal.reason in OUTSIDE_REASONS:
            return
        assert tokens == expected.tokens, f"handle {handle} ended early: {terminal}"
        found = (terminal.reason, terminal.stop_token, terminal.stop_string_index)
        assert found == (expected.reason, expected.stop_token, expected.stop_string_index), found
