"""The core: every request's truth, as a state machine without I/O.

Words of gateways, results of steps and the time go in; frames for the executor and updates for
the gateways come out. It opens no socket, reads no clock and draws no random number: `now` is an
argument, in seconds on CLOCK_MONOTONIC, and never goes back. It must not know of sockets, mappings
or devices. The shell (`loop.py`) calls it, from one thread::

    word of a gateway ──▶ submit / cancel / cancel_by_id / gateway_gone ─┐
    StepDone ──▶ result                                                  ├─▶ take_updates
    next_deadline has passed ──▶ tick                                    ┘
    while can_build: build ──▶ apply_assignments to the seat table, write the slot, StepReady

Step numbers go up by one for the whole life of a core, over all epochs; the first step is 0.
"""

from __future__ import annotations

from gapless.protos.messages import (
    Admitted,
    Cancel,
    Epoch,
    Failed,
    Finished,
    FinishReason,
    Handle,
    PrefillStarted,
    ServerState,
    Stats,
    Submit,
    Update,
    Vocabulary,
)
from gapless.protos.reasons import Reason
from gapless.protos.seats import Int32s
from gapless.protos.slots import Frame, Result, RowFault
from gapless.scheduler import invariants
from gapless.scheduler.admission import refusal_of, sequence_of
from gapless.scheduler.config import CoreConfig, GatewayIndex
from gapless.scheduler.frames import Composer
from gapless.scheduler.intake import Intake, TokenTexts
from gapless.scheduler.outbox import Outbox
from gapless.scheduler.pipeline import Flight, Pipeline
from gapless.scheduler.placement import Placement
from gapless.scheduler.planner import Planner
from gapless.scheduler.queues import Clock, Timers
from gapless.scheduler.registry import Registry
from gapless.scheduler.request import Move, Phase, Sequence, Stop, stop_of
from gapless.scheduler.statistics import Totals, Window, Work


class Core:
    """Queues, KV blocks, batches and stops of one executor."""

    def __init__(self, config: CoreConfig, epoch: Epoch) -> None:
        """A core at rest. `epoch` is the attached executor's; see `rewind_all` for the next one."""
        self.config = config
        self._placement = Placement(config)
        self._planner = Planner(config, self._placement)
        self._composer = Composer(config.row_max)
        self._pipeline = Pipeline(config.depth, epoch)
        self._work = Work()
        self._intake = Intake(self._placement.seats, config.vocab_size, self._work)
        self._registry = Registry()
        self._timers = Timers()
        self._outbox = Outbox()
        self._totals = Totals()
        self._window = Window()
        self._arrival_count = 0
        self._draining = False
        self._last_result_s: float | None = None

    # ------------------------------------------------------------------ words of gateways

    def set_vocabulary(self, vocabulary: Vocabulary) -> None:
        """The bytes of all tokens; needed before the first `submit` with stop strings."""
        self._intake.texts = TokenTexts(vocabulary)

    def submit(self, now: float, gateway: GatewayIndex, word: Submit) -> None:
        """Admits a request (event `Admitted`) or refuses it (`Failed`, without `Admitted`).

        Refusals: DRAINING, REQUEST_ID_IN_USE, KV_CAPACITY_EXCEEDED, QUEUE_FULL.
        """
        assert word.candidate_count == 1, "one sequence a request"
        self._totals.requests += 1
        refusal = refusal_of(
            word,
            self.config,
            is_draining=self._draining,
            is_id_in_use=self._registry.by_request_id(word.tenant, word.request_id) is not None,
            waiting=self._placement.waiting,
            ended_per_second=self._window.ended_per_second(now),
        )
        if refusal is not None:
            self._totals.rejected += 1
            self._outbox.add_event(gateway, refusal)
            return
        self._arrival_count += 1
        sequence = sequence_of(word, self.config, gateway, self._arrival_count, now)
        self._totals.prompt_tokens += sequence.prompt_length
        self._registry.add(sequence)
        self._work.arrived(sequence)
        self._outbox.add_event(gateway, Admitted(word.handle))
        stop = self._stop_in_prior(sequence)
        self._placement.admit(sequence, now)
        if stop is not None:
            self._finish(now, sequence, stop)
            return
        for duration_s, clock in (
            (word.queue_timeout_s, Clock.QUEUE_TIMEOUT),
            (word.time_limit_s, Clock.TIME_LIMIT),
        ):
            if duration_s is not None:
                self._timers.start(now + duration_s, sequence, clock)
        if word.deadline_s is not None:
            self._timers.start(word.deadline_s, sequence, Clock.DEADLINE)

    def cancel(self, now: float, gateway: GatewayIndex, word: Cancel) -> None:
        """Ends sequences with `Finished` CANCELLED; handles that have just ended are ignored."""
        for handle in word.handles:
            sequence = self._registry.by_handle(gateway, handle)
            if sequence is not None:
                self._finish(now, sequence, Stop(FinishReason.CANCELLED))

    def cancel_by_id(
        self, now: float, tenant: str, request_ids: tuple[str, ...]
    ) -> tuple[str, ...]:
        """Ends requests of a tenant with `Finished` CANCELLED; the ids that were live, in order."""
        found = []
        for request_id in request_ids:
            sequence = self._registry.by_request_id(tenant, request_id)
            if sequence is not None:
                self._finish(now, sequence, Stop(FinishReason.CANCELLED))
                found.append(request_id)
        return tuple(found)

    def gateway_gone(self, now: float, gateway: GatewayIndex) -> None:
        """Ends all sequences of a gateway; nobody is told, and its updates are dropped."""
        for sequence in self._registry.of_gateway(gateway):
            self._finish(now, sequence, Stop(FinishReason.CANCELLED))
        self._outbox.forget(gateway)

    # ------------------------------------------------------------------ time

    def next_deadline(self) -> float | None:
        """When `tick` has something to do at the earliest; None if no clock runs."""
        return self._timers.next_due()

    def tick(self, now: float) -> None:
        """Ends what is due: deadlines, queue timeouts, soft time limits."""
        while (due := self._timers.pop_due(now)) is not None:
            sequence, clock = due
            if clock is Clock.TIME_LIMIT:
                self._finish(now, sequence, Stop(FinishReason.TIME_LIMIT))
            elif clock is Clock.DEADLINE:
                self._fail(now, sequence, Reason.DEADLINE, "the deadline of the call has passed")
            elif sequence.phase is Phase.QUEUED:  # Else it has had its first row in time.
                queued_ms = round((now - sequence.admitted_s) * 1000)
                self._fail(
                    now,
                    sequence,
                    Reason.QUEUE_TIMEOUT,
                    f"waited {queued_ms} ms for its first row, longer than its queue timeout",
                    {"queuedMs": str(queued_ms)},
                )

    # ------------------------------------------------------------------ steps

    def can_build(self) -> bool:
        """Whether the fence admits another step and some sequence is live.

        `build` may still return None: all rows wait for results in flight.
        """
        return not self._pipeline.is_full and len(self._registry) > 0

    def build(self, now: float) -> Frame | None:
        """Plans the next step and marks it in flight; None if no row can run now.

        The caller applies the frame's assignments to the shared seat table
        (`frames.apply_assignments`), writes the frame into its slot and sends `StepReady`, before
        the next call of `build`. Never None when nothing is in flight and a sequence is live.
        """
        pipeline, seats = self._pipeline, self._placement.seats
        assert not pipeline.is_full, "the fence forbids another step: see can_build"
        plan = self._planner.plan(now)
        if plan is None:
            assert pipeline.flights or not len(self._registry), (
                f"{len(self._registry)} sequences live, no row can run and no result will come"
            )
            return None
        step = pipeline.next_step
        frame = self._composer.compose(plan, seats, pipeline.epoch, step, int(now * 1e9))
        rows = frame.rows
        seats.advance(plan.seats, rows, step)
        samples = None if plan.all_sample else rows.result_count == 1
        pipeline.publish(Flight(step, plan.seats, rows.context_length, samples))
        for chunk in plan.chunks:
            sequence = seats.sequence(chunk.seat)
            if sequence.started_s is None:
                sequence.started_s = now
                event = PrefillStarted(sequence.handle, now - sequence.admitted_s)
                self._outbox.add_event(sequence.gateway, event)
        return frame

    def result(self, now: float, result: Result, behind_ns: int = 0) -> None:
        """Takes a step's tokens, which also acknowledges it; that of an older epoch is dropped.

        Nothing of `result` is kept: its arrays may be views on the result slot. Its stamps are of
        a clock that is `behind_ns` behind that of `now`.
        """
        if result.epoch != self._pipeline.epoch:
            assert result.epoch < self._pipeline.epoch, (result.epoch, self._pipeline.epoch)
            return
        flight = self._pipeline.acknowledge(result.step)
        self._work.step(result, behind_ns)
        taken = self._intake.take(flight, result, now)
        token_count = len(taken.tokens)
        self._work.gave(result, token_count)
        self._outbox.add_tokens(taken.gateways, taken.handles, taken.tokens)
        for sequence, stop in taken.stopped:
            self._finish(now, sequence, stop)
        for sequence, fault in taken.faulted:
            known = {each.value: each.name for each in RowFault if each is not RowFault.NONE}
            name = known.get(fault, "TOKEN_OUT_OF_RANGE")
            message = f"the model gave no valid token: {name}"
            self._fail(now, sequence, Reason.ENGINE_ERROR, message, {"fault": name})
        self._placement.acknowledge(flight.step, now)
        self._totals.steps += 1
        self._totals.generated_tokens += token_count
        self._window.add_step(now, result.finished_ns - result.started_ns, token_count)
        self._last_result_s = now

    # ------------------------------------------------------------------ loss and rewind

    def rewind(self, now: float, gateway: GatewayIndex, handle: Handle) -> bool:
        """Preempts one sequence: it gives up seat and blocks and waits to be computed again.

        False if it does not run. Tokens in flight are still taken.
        """
        sequence = self._registry.by_handle(gateway, handle)
        if sequence is None or sequence.phase is not Phase.RUNNING:
            return False
        self._placement.preempt(sequence, now)
        return True

    def rewind_all(self, now: float, epoch: Epoch, *, keep_kv: bool) -> None:
        """A new executor, with an empty pipeline, takes the place of the one that was lost.

        Every running sequence goes back to its last acknowledged token and keeps seat and blocks.
        With `keep_kv` (executor lost) acknowledged positions stand and only the others are computed
        again; without (KV memory lost) all are. The caller gives the new executor a new seat table:
        `write_table` on zeroed memory. The new executor's facts must be those of the core's config;
        with others, the shell fails everyone and begins a new core.
        """
        self._pipeline.reset(epoch)
        # Whoever could touch anything is gone, so every fence is open.
        self._placement.acknowledge(self._pipeline.published_step, now)
        for sequence in self._placement.seats.holders():
            sequence.move(Move.REWIND)
        self._placement.seats.rewind(keep_kv=keep_kv)

    def write_table(self, table: Int32s) -> None:
        """Writes all seats into a zeroed table, int32 ``[seat_count, words]`` (a new epoch)."""
        self._placement.write_table(table)

    def fail_all(self, now: float, reason: Reason, message: str) -> None:
        """Ends every live sequence with `Failed` (such as EXECUTOR_LOST)."""
        for sequence in list(self._registry):
            self._fail(now, sequence, reason, message)

    def drain(self, now: float) -> None:
        """From now on every `submit` is refused with DRAINING; what is live goes on."""
        del now
        self._draining = True

    # ------------------------------------------------------------------ what comes out

    def take_updates(self) -> dict[GatewayIndex, Update]:
        """What changed since the last call, one update a gateway; gateways without news are absent.

        Call it after each result and each batch of words.
        """
        return self._outbox.take()

    def stats(self, now: float) -> Stats:
        """One snapshot; its state is DRAINING after `drain`, else SERVING."""
        placement, totals = self._placement, self._totals
        longest = next(iter(placement.waiting), None)
        blocks = placement.blocks
        return Stats(
            state=ServerState.DRAINING if self._draining else ServerState.SERVING,
            running_requests=placement.seats.live_count,
            queued_requests=len(placement.waiting),
            queued_tokens=placement.waiting.tokens,
            oldest_queued_s=0.0 if longest is None else now - longest.queued_s,
            blocks_active=blocks.taken_count + blocks.fenced_count,
            blocks_free=blocks.free_count,
            seats_active=self.config.running_max - placement.free_seats.free_count,
            requests_total=totals.requests,
            requests_rejected_total=totals.rejected,
            requests_failed_total=totals.failed,
            requests_cancelled_total=totals.cancelled,
            prompt_tokens_total=totals.prompt_tokens,
            cached_prompt_tokens_total=0,
            generated_tokens_total=totals.generated_tokens,
            preemptions_total=placement.preemption_count,
            steps_total=totals.steps,
            generated_tokens_per_second=self._window.tokens_per_second(now),
            mean_step_s=self._window.mean_step_s(now),
            last_step_s=0.0 if self._last_result_s is None else now - self._last_result_s,
            step_counts=tuple(self._work.token_counts),
        )

    @property
    def epoch(self) -> Epoch:
        """The epoch of the attached executor."""
        return self._pipeline.epoch

    @property
    def is_draining(self) -> bool:
        return self._draining

    @property
    def is_idle(self) -> bool:
        """No live sequence and no step in flight."""
        return not len(self._registry) and not self._pipeline.flights

    @property
    def in_flight_count(self) -> int:
        """Steps published and not acknowledged."""
        return len(self._pipeline.flights)

    def check(self) -> None:
        """Asserts every invariant, in O(live sequences + seats + blocks)."""
        invariants.check(self._placement, self._pipeline, self._registry)

    # ------------------------------------------------------------------ begin and end

    def _stop_in_prior(self, sequence: Sequence) -> Stop | None:
        """Feeds the tokens that were generated before; they may have been the last ones."""
        for index in range(sequence.prompt_length, len(sequence.tokens)):
            token = int(sequence.tokens[index])
            text = self._intake.text_for(sequence, token)
            stop = stop_of(sequence, token, index + 1, text)
            if stop is not None:
                sequence.tokens = sequence.tokens[: index + 1]
                return stop
        return None

    def _finish(self, now: float, sequence: Sequence, stop: Stop) -> None:
        if stop.reason is FinishReason.CANCELLED:
            self._totals.cancelled += 1
        self._end(now, sequence)
        event = Finished(
            handle=sequence.handle,
            reason=stop.reason,
            completion_tokens=len(sequence.tokens) - sequence.prompt_length,
            cached_prompt_tokens=0,
            preemption_count=sequence.preemption_count,
            timing=sequence.timing(now),
            stop_token=stop.stop_token,
            stop_string_index=stop.stop_string_index,
        )
        self._outbox.add_event(sequence.gateway, event)

    def _fail(
        self,
        now: float,
        sequence: Sequence,
        reason: Reason,
        message: str,
        metadata: dict[str, str] | None = None,
    ) -> None:
        self._totals.failed += 1
        self._end(now, sequence)
        event = Failed(sequence.handle, reason, message, metadata or {})
        self._outbox.add_event(sequence.gateway, event)

    def _end(self, now: float, sequence: Sequence) -> None:
        """The one way out: frees everything that carries the sequence's name."""
        self._placement.remove(sequence)
        sequence.move(Move.END)
        self._registry.remove(sequence)
        self._timers.stop_all(sequence)
        self._window.add_ended(now)
