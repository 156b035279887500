"""The scheduler's loop: the core's hands and ears, in one thread.

Owns the core, the server's state and the order of things in a turn:

    wait ─▶ signals ─▶ results of steps ─▶ next frames ─▶ updates ─▶ words of gateways
      ▲                                                                     │
      └──── rest (checks, garbage) ◀─ beats ◀─ updates ◀─ next frames ◀─ time ┘

A frame goes out before anything is told to a gateway: the executor never waits for a socket of
somebody else. It must not know how a batch is chosen (the core), nor what a socket is (`gateways`,
`executors`). Called by `__main__`.
"""

from __future__ import annotations

import enum
import logging
import math
import os
import time
import uuid
from typing import Any, Final

import msgspec
import zmq

from gapless.protos.messages import (
    Cancel,
    CancelById,
    CancelCause,
    Cancelled,
    ExecutorFault,
    ExecutorHello,
    ExecutorReady,
    ExecutorWord,
    Failed,
    GatewayGoodbye,
    GatewayHello,
    GatewayWord,
    GetStats,
    ModelFacts,
    ServerState,
    StateChanged,
    Stats,
    StatsReply,
    StepDone,
    Stop,
    Submit,
    Update,
    Welcome,
)
from gapless.protos.reasons import Reason
from gapless.protos.wakeful import Wakeful
from gapless.scheduler.config import GatewayIndex
from gapless.scheduler.core import Core
from gapless.scheduler.device_time import DeviceTimes
from gapless.scheduler.executors import Executors, facts_mistake
from gapless.scheduler.gateways import Gateways, hello_mistake, submit_mistake
from gapless.scheduler.journal import Journal
from gapless.scheduler.options import Options
from gapless.scheduler.rest import Rest
from gapless.scheduler.routers import PeerId
from gapless.scheduler.signals import Signals
from gapless.scheduler.step_log import StepLog

log = logging.getLogger(__name__)

GATEWAY_WORDS_MAX: Final = 64
"""Words of gateways taken in one turn: how long a result may have to wait for them."""
EXECUTOR_WORDS_MAX: Final = 16
RETRY_AFTER_S: Final = 1.0


class Ending(enum.IntEnum):
    """How a scheduler ends: its exit status."""

    DONE = 0
    EXECUTOR_LOST = 3
    BUG = 4
    FORCED = 130
    """A second signal: what ran is abandoned."""


class Loop:
    """One scheduler, from bound sockets to its end."""

    def __init__(
        self,
        options: Options,
        gateways: Gateways,
        executors: Executors,
        signals: Signals,
        step_log: StepLog | None = None,
    ) -> None:
        self._options = options
        self._step_log = step_log
        self._device_times = DeviceTimes(has_own_clock=False)
        self._wakeful = Wakeful(core_count=0)
        self._gateways = gateways
        self._executors = executors
        self._signals = signals
        self._journal = Journal()
        self._rest = Rest(time.monotonic())
        self._instance_id = uuid.uuid4().hex
        self._state = ServerState.STARTING
        self._facts: ModelFacts | None = None
        self._core: Core | None = None
        self._drain_until: float | None = None
        self._ending: Ending | None = None
        self._welcome: set[GatewayIndex] = set()
        self._poller = zmq.Poller()
        for source in (signals.source, *executors.sources, *gateways.sources):
            self._poller.register(source, zmq.POLLIN)

    def run(self) -> Ending:
        """Serves until the end; then everyone connected has been told."""
        try:
            while self._ending is None:
                self._wait()
                self._turn()
        except Exception:
            # Whatever it is, it is our mistake: nothing here is trusted any more but the journal.
            log.exception("the scheduler broke")
            self._abandon_all(time.monotonic())
            self._ending = Ending.BUG
        self._executors.stop()
        log.info("end: %s", self._ending.name.lower())
        return self._ending

    # ------------------------------------------------------------------ a turn

    def _wait(self) -> None:
        """Until something can be read or a time has come; awake while a result is near."""
        if self._core is not None and self._core.in_flight_count:
            while self._wakeful.stays_awake(time.monotonic_ns()):
                if self._poller.poll(0):
                    return
        self._poller.poll(self._timeout_ms(time.monotonic()))

    def _turn(self) -> None:
        self._read_signals(time.monotonic())
        self._read_executor()
        now = time.monotonic()
        self._drop_departed(now)
        self._tell(now)
        self._read_gateways(now)
        if self._core is not None and self._ending is None:
            self._core.tick(now)
            self._build(self._core)
            now = time.monotonic()
            self._tell(now)
        self._gateways.beat(now)
        self._drop_departed(now)
        if self._drain_until is not None and self._ending is None:
            self._go_on_draining(now)
        self._rest.take(now, self._core)

    def _timeout_ms(self, now: float) -> int | None:
        """How long nothing happens by itself."""
        due = [self._gateways.next_beat, self._rest.next_at(self._core), self._drain_until]
        if self._core is not None:
            due.append(self._core.next_deadline())
        first = min((at for at in due if at is not None), default=None)
        return None if first is None else max(0, math.ceil(1000 * (first - now)))

    def _build(self, core: Core) -> None:
        """Publishes steps for as long as the fence admits one."""
        while core.can_build():
            frame = core.build(time.monotonic())
            if frame is None:
                return
            published_ns = self._executors.publish(frame)
            self._device_times.published(frame.step, published_ns)
            if self._step_log is not None:
                self._step_log.published(frame, published_ns)

    def _tell(self, now: float) -> None:
        """Sends what changed, and writes down what ended."""
        if self._core is None:
            return
        for gateway, update in self._core.take_updates().items():
            self._gateways.send(now, gateway, update)
            self._journal.end(now, gateway, update.events)

    def _drop_departed(self, now: float) -> None:
        """Gateways that are gone leave nothing behind."""
        for gateway in self._gateways.departed():
            self._drop(now, gateway, "is gone")

    def _drop(self, now: float, gateway: GatewayIndex, why: str) -> None:
        log.info("gateway %d %s", gateway, why)
        if self._core is not None:
            self._core.gateway_gone(now, gateway)
        self._journal.forget(gateway)
        self._welcome.discard(gateway)

    # ------------------------------------------------------------------ signals and drain

    def _read_signals(self, now: float) -> None:
        for number in self._signals.take():
            if self._drain_until is None:
                limit_s = self._options.drain_timeout_s
                log.info("%s: draining, for at most %g s", number.name, limit_s)
                self._set_state(now, ServerState.DRAINING)
                self._drain_until = now + self._options.drain_timeout_s
                if self._core is not None:
                    self._core.drain(now)
            else:
                log.warning("%s again: stopping at once", number.name)
                self._fail_all(now, Reason.SCHEDULER_LOST, "the scheduler was stopped")
                self._set_state(now, ServerState.FAILED)
                self._ending = Ending.FORCED

    def _go_on_draining(self, now: float) -> None:
        """Ends when nothing is live; at the end of the period whatever is live is cancelled."""
        assert self._drain_until is not None
        if self._core is not None and now >= self._drain_until:
            for gateway, handles in self._journal.live():
                self._core.cancel(now, gateway, Cancel(handles, CancelCause.DRAIN))
            self._tell(now)
            assert self._journal.live_count == 0, f"{self._journal.live_count} survived the drain"
        if self._journal.live_count == 0:
            self._ending = Ending.DONE

    # ------------------------------------------------------------------ executor

    def _read_executor(self) -> None:
        departed = self._executors.departed()  # what it said before still counts
        for peer, word in self._executors.receive(EXECUTOR_WORDS_MAX):
            self._on_executor_word(time.monotonic(), peer, word)
        if departed and self._ending is None:
            self._lose_executor(time.monotonic(), "the executor is gone")

    def _on_executor_word(self, now: float, peer: PeerId, word: ExecutorWord) -> None:
        if isinstance(word, ExecutorHello):
            self._on_executor_hello(peer, word)
            return
        if peer != self._executors.attached or self._core is None:
            log.error("dropped %s of an executor that is not attached", type(word).__name__)
            return
        if word.epoch != self._executors.epoch:
            log.info("dropped %s of epoch %d", type(word).__name__, word.epoch)
            return
        match word:
            case StepDone():
                result = self._executors.result(word)
                self._core.result(now, result, self._device_times.behind_ns)
                self._device_times.taken(result, now)
                if self._step_log is not None:
                    self._step_log.taken(result, now)
                self._wakeful.step_ended(result.finished_ns - result.started_ns, int(now * 1e9))
                if self._ending is None:
                    self._build(self._core)
            case ExecutorReady():
                self._serve(now)
            case ExecutorFault(message=message):
                self._lose_executor(now, f"the executor broke: {message}")

    def _on_executor_hello(self, peer: PeerId, word: ExecutorHello) -> None:
        mistake = facts_mistake(word.facts)
        if self._executors.attached is not None:
            mistake = "another one is attached"
        elif self._state is ServerState.DRAINING:
            mistake = "the server is draining"
        if mistake is not None:
            log.error("refused the executor of process %d: %s", word.pid, mistake)
            self._executors.send(peer, Stop())
            return
        config = self._options.core_config(word.facts)
        attach = self._executors.attach(peer, config)
        self._facts, self._core = word.facts, Core(config, attach.epoch)
        is_gpu = word.facts.device.startswith("cuda")
        self._device_times = DeviceTimes(has_own_clock=is_gpu)
        self._wakeful = Wakeful(len(os.sched_getaffinity(0)) if is_gpu else 0)
        log.info(
            "attached the executor of process %d, epoch %d: %s, %s, %d blocks of %d tokens",
            *(word.pid, attach.epoch, word.facts.device, word.facts.dtype),
            *(word.facts.block_count, word.facts.block_tokens),
        )

    def _serve(self, now: float) -> None:
        """The executor is ready: everyone who waited may come in."""
        self._executors.open_results()
        if self._state is ServerState.STARTING:
            self._state = ServerState.SERVING
            log.info("serving")
        for gateway, hello in self._gateways.greeted():
            self._greet(now, gateway, hello)

    def _lose_executor(self, now: float, message: str) -> None:
        log.error("%s", message)
        self._fail_all(now, Reason.EXECUTOR_LOST, message)
        self._set_state(now, ServerState.FAILED)
        self._ending = Ending.EXECUTOR_LOST

    def _fail_all(self, now: float, reason: Reason, message: str) -> None:
        if self._core is not None:
            self._core.fail_all(now, reason, message)
            self._tell(now)

    def _abandon_all(self, now: float) -> None:
        """Tells every live request that it is over, without asking the core."""
        for gateway, handles in self._journal.live():
            events = tuple(
                Failed(handle, Reason.ENGINE_ERROR, "internal error") for handle in handles
            )
            self._gateways.send(now, gateway, Update(events=events))
            self._journal.end(now, gateway, events)
        self._set_state(now, ServerState.FAILED)

    # ------------------------------------------------------------------ gateways

    def _read_gateways(self, now: float) -> None:
        for gateway, word in self._gateways.receive(now, GATEWAY_WORDS_MAX):
            self._on_gateway_word(now, gateway, word)

    def _on_gateway_word(self, now: float, gateway: GatewayIndex, word: GatewayWord) -> None:
        core = self._core
        match word:
            case Submit():
                self._submit(now, gateway, word)
            case Cancel():
                if core is not None:
                    core.cancel(now, gateway, word)
            case CancelById(call=call, tenant=tenant, request_ids=request_ids):
                live = core.cancel_by_id(now, tenant, request_ids) if core is not None else ()
                self._gateways.send(now, gateway, Cancelled(call, live))
            case GetStats(call=call):
                self._gateways.send(now, gateway, StatsReply(call, self._stats(now)))
            case GatewayHello():
                self._greet(now, gateway, word)
            case GatewayGoodbye():
                self._gateways.leave(gateway)
                self._drop(now, gateway, "said goodbye")

    def _greet(self, now: float, gateway: GatewayIndex, hello: GatewayHello) -> None:
        """Says what state we are in and, once that is known, which model this is."""
        if self._facts is None or self._core is None or self._state is ServerState.STARTING:
            self._gateways.send(now, gateway, StateChanged(self._state))
            return
        mistake = hello_mistake(hello, self._facts)
        if mistake is not None:
            log.error("gateway %d cannot be served: %s", gateway, mistake)
            self._gateways.send(now, gateway, StateChanged(ServerState.FAILED))
            return
        # All that pass have the same revision and so the same vocabulary.
        self._core.set_vocabulary(hello.vocabulary)
        self._welcome.add(gateway)
        self._gateways.send(now, gateway, StateChanged(self._state))
        limits = self._core.config.limits
        self._gateways.send(now, gateway, Welcome(self._instance_id, self._facts, limits))

    def _submit(self, now: float, gateway: GatewayIndex, word: Submit) -> None:
        if self._journal.is_live(gateway, word.handle):
            log.error("gateway %d: dropped a second Submit of handle %d", gateway, word.handle)
            return
        refusal = self._refusal(gateway, word)
        if refusal is not None:
            self._gateways.send(now, gateway, Update(events=(refusal,)))
            return
        assert self._core is not None
        if self._core.is_idle:
            self._device_times.work_arrived(now)
            if self._step_log is not None:
                self._step_log.work_arrived(now)
        self._journal.begin(now, gateway, word)
        self._core.submit(now, gateway, word)

    def _refusal(self, gateway: GatewayIndex, word: Submit) -> Failed | None:
        """Why a request cannot even be put to the core."""
        handle = word.handle
        match self._state:
            case ServerState.STARTING:
                reason, message = Reason.STARTING, "the model is being loaded"
                return Failed(handle, reason, message, retry_after_s=RETRY_AFTER_S)
            case ServerState.FAILED:
                return Failed(handle, Reason.NO_EXECUTOR, "the server cannot go on")
            case ServerState.DRAINING if gateway not in self._welcome:
                return Failed(handle, Reason.DRAINING, "the server is stopping")
        if gateway not in self._welcome:
            return Failed(handle, Reason.NO_EXECUTOR, "no executor has this gateway's model")
        assert self._facts is not None
        mistake = submit_mistake(word, self._facts)
        if mistake is not None:
            log.error("gateway %d sent what it must not: %s", gateway, mistake)
            return Failed(handle, Reason.ENGINE_ERROR, "the gateway sent an invalid request")
        return None

    def _stats(self, now: float) -> Stats:
        if self._core is not None and self._state is not ServerState.STARTING:
            device_time = self._device_times.snapshot()
            return msgspec.structs.replace(self._core.stats(now), device_time=device_time)
        zeros: dict[str, Any] = dict.fromkeys(Stats.__struct_fields__[1:-2], 0)
        return Stats(self._state, **zeros)

    def _set_state(self, now: float, state: ServerState) -> None:
        self._state = state
        for gateway, _ in self._gateways.greeted():
            self._gateways.send(now, gateway, StateChanged(state))
