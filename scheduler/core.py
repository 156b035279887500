"""The core: every request's truth, as a state machine without I/O.

Words of gateways, results of steps and the time go in; frames for the executor and updates for
the gateways come out. It opens no socket, reads no clock and draws no random number: `now` is an
argument, in seconds on CLOCK_MONOTONIC, and never goes back. It must not know of sockets, mappings
or devices. The shell (`loop.py`) calls it, from one thread::

    word of a gateway ──▶ submit / cancel / cancel_by_id / gateway_gone ─┐
    StepDone ──▶ result                                                  ├─▶ take_updates ──▶ gateways
    next_deadline passed ──▶ tick                                        ┘
    while can_build: frame = build(now) ──▶ apply_assignments(table), slots.write(frame), StepReady

Step numbers go up by one for the whole life of a core, over all epochs; the first step is 0.
"""

from __future__ import annotations

from gapless.protos.messages import (
    Cancel,
    Epoch,
    Handle,
    Stats,
    Submit,
    Update,
    Vocabulary,
)
from gapless.protos.reasons import Reason
from gapless.protos.seats import Int32s
from gapless.protos.slots import Frame, Result
from gapless.scheduler.config import CoreConfig, GatewayIndex


class Core:
    """Queues, KV blocks, batches and stops of one executor."""

    def __init__(self, config: CoreConfig, epoch: Epoch) -> None:
        """A core at rest. `epoch` is the attached executor's; see `rewind_all` for the next one."""
        self.config = config
        self.epoch = epoch

    # ------------------------------------------------------------------ words of gateways

    def set_vocabulary(self, vocabulary: Vocabulary) -> None:
        """The bytes of all tokens; needed before the first `submit` with stop strings."""
        raise NotImplementedError

    def submit(self, now: float, gateway: GatewayIndex, word: Submit) -> None:
        """Admits a request (event `Admitted`) or refuses it (`Failed`, without `Admitted`).

        Refusals: DRAINING, REQUEST_ID_IN_USE, KV_CAPACITY_EXCEEDED, QUEUE_FULL.
        """
        raise NotImplementedError

    def cancel(self, now: float, gateway: GatewayIndex, word: Cancel) -> None:
        """Ends sequences with `Finished` CANCELLED; handles that have just ended are ignored."""
        raise NotImplementedError

    def cancel_by_id(
        self, now: float, tenant: str, request_ids: tuple[str, ...]
    ) -> tuple[str, ...]:
        """Ends requests of a tenant with `Finished` CANCELLED; the ids that were live, in order."""
        raise NotImplementedError

    def gateway_gone(self, now: float, gateway: GatewayIndex) -> None:
        """Ends all sequences of a gateway; nobody is told, and its updates are dropped."""
        raise NotImplementedError

    # ------------------------------------------------------------------ time

    def next_deadline(self) -> float | None:
        """When `tick` has something to do at the earliest; None if no clock runs."""
        raise NotImplementedError

    def tick(self, now: float) -> None:
        """Ends what is due: deadlines, queue timeouts, soft time limits."""
        raise NotImplementedError

    # ------------------------------------------------------------------ steps

    def can_build(self) -> bool:
        """Whether the fence admits another step and some sequence is live.

        `build` may still return None: all rows wait for results in flight.
        """
        raise NotImplementedError

    def build(self, now: float) -> Frame | None:
        """Plans the next step and marks it in flight; None if no row can run now.

        The caller applies the frame's assignments to the shared seat table
        (`frames.apply_assignments`), writes the frame into its slot and sends `StepReady`, before
        the next call of `build`. Never None when nothing is in flight and a sequence is live.
        """
        raise NotImplementedError

    def result(self, now: float, result: Result) -> None:
        """Takes a step's tokens, which also acknowledges it; that of an older epoch is dropped.

        Nothing of `result` is kept: its arrays may be views on the result slot.
        """
        raise NotImplementedError

    # ------------------------------------------------------------------ loss and rewind

    def rewind(self, now: float, gateway: GatewayIndex, handle: Handle) -> bool:
        """Preempts one sequence: it gives up seat and blocks and waits to be computed again.

        False if it holds no seat. Tokens in flight are still taken.
        """
        raise NotImplementedError

    def rewind_all(self, now: float, epoch: Epoch, *, keep_kv: bool) -> None:
        """A new executor, with an empty pipeline, takes the place of the one that was lost.

        Every running sequence goes back to its last acknowledged token and keeps seat and blocks.
        With `keep_kv` (executor lost) acknowledged positions stand and only the others are computed
        again; without (KV memory lost) all are. The caller writes a new seat table first:
        `write_table` on zeroed memory.
        """
        raise NotImplementedError

    def write_table(self, table: Int32s) -> None:
        """Writes all seats into a zeroed table, int32 ``[seat_count, words]`` (a new epoch)."""
        raise NotImplementedError

    def fail_all(self, now: float, reason: Reason, message: str) -> None:
        """Ends every live sequence with `Failed` (such as EXECUTOR_LOST)."""
        raise NotImplementedError

    def drain(self, now: float) -> None:
        """From now on every `submit` is refused with DRAINING; what is live goes on."""
        raise NotImplementedError

    # ------------------------------------------------------------------ what comes out

    def take_updates(self) -> dict[GatewayIndex, Update]:
        """What changed since the last call, one update a gateway; gateways without news are absent.

        Call it after each result and each batch of words.
        """
        raise NotImplementedError

    def stats(self, now: float) -> Stats:
        """One snapshot; its state is DRAINING after `drain`, else SERVING."""
        raise NotImplementedError

    @property
    def is_draining(self) -> bool:
        raise NotImplementedError

    @property
    def is_idle(self) -> bool:
        """No live sequence and no step in flight."""
        raise NotImplementedError

    @property
    def in_flight_count(self) -> int:
        """Steps published and not acknowledged."""
        raise NotImplementedError

    def check(self) -> None:
        """Asserts every invariant, in O(live sequences + seats + blocks)."""
        raise NotImplementedError
