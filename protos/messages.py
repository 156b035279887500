"""Private messages between gateway, scheduler and executor (msgspec, over ZeroMQ).

Two conversations, each with one union a direction::

    gateway  ── GatewayWord ──▶  scheduler  ── SchedulerUpdate ──▶  gateway
    executor ── ExecutorWord ─▶  scheduler  ── SchedulerWord ────▶  executor

All times are seconds on CLOCK_MONOTONIC, which all processes of one machine share. Token ids in
bulk travel as little-endian int32 bytes. A *handle* is a gateway's own number for one sequence:
the gateway draws `candidate_count` consecutive numbers a request and never uses one twice.
"""

from __future__ import annotations

import enum
from typing import NewType

import msgspec

from gapless.protos.bubbles import STEP_BOUNDS_US, DeviceTime
from gapless.protos.reasons import Reason
from gapless.protos.sampling import Sampling

Handle = NewType("Handle", int)
Epoch = NewType("Epoch", int)
StepNumber = NewType("StepNumber", int)


class FinishReason(enum.IntEnum):
    """Why a sequence ended well; the numbers are those of the public enum."""

    STOP_TOKEN = 1
    STOP_STRING = 2
    MAX_NEW_TOKENS = 3
    CONTEXT_LENGTH = 4
    TIME_LIMIT = 5
    CANCELLED = 6
    CONSTRAINT_COMPLETE = 7


class CancelCause(enum.IntEnum):
    """Who wants a sequence to end."""

    CLIENT = 1
    """The stream is gone (cancelled, disconnected, deadline passed at the transport)."""
    API = 2
    """CancelGenerate."""
    DRAIN = 3
    """The drain period is over."""
    SLOW_CONSUMER = 4


class ServerState(enum.IntEnum):
    """What a Generate may expect; the numbers are those of the public enum."""

    STARTING = 1
    SERVING = 2
    DRAINING = 3
    FAILED = 4


# ------------------------------------------------------------------ shared values


class ModelFacts(msgspec.Struct, frozen=True):
    """What the executor knows of its model and its device; constant for an epoch."""

    revision: str
    """`model_folder.revision` of the folder it loaded; a gateway's must be equal."""
    vocab_size: int
    context_length: int
    """Longest prompt plus output, in tokens."""
    block_tokens: int
    block_count: int
    """Blocks in the pool, the scratch block included."""
    row_max: int
    """Most rows in a step."""
    token_max: int
    """Most input tokens in a step."""
    device: str
    """Such as "cuda:0", "cpu"."""
    dtype: str


class Stopping(msgspec.Struct, frozen=True, array_like=True):
    """When a sequence ends. Defaults are resolved: `max_new_tokens` fits the context."""

    max_new_tokens: int
    min_new_tokens: int = 0
    """Stop tokens and stop strings that complete before this many tokens are ignored."""
    stop_tokens: tuple[int, ...] = ()
    """The model's end tokens (unless ignore_eos) and the caller's, without repeats."""
    stop_strings: tuple[bytes, ...] = ()
    """UTF-8, in the caller's order."""
    skip_special_tokens: bool = True
    """Whether special tokens have no text; stop strings are matched on text as it is shown."""
    max_new_tokens_is_room: bool = False
    """The limit is the room left in the context: reaching it is CONTEXT_LENGTH."""


class Vocabulary(msgspec.Struct, frozen=True):
    """The bytes of every token, from which the scheduler decides stop strings.

    Token i is ``data[ends[i-1]:ends[i]]``; ids without text (holes) are empty.
    """

    data: bytes
    ends: bytes
    """uint32 little-endian, vocab_size values."""
    special: bytes
    """One byte a token: 1 if it is a special (control) token."""


class Limits(msgspec.Struct, frozen=True):
    """Admission limits in force, for GetModel, GetServerInfo and validation in the gateway."""

    running_max: int
    """Most sequences with a seat."""
    queued_max: int
    """Most requests that wait."""
    queued_tokens_max: int
    """Most prompt tokens that wait; 0 = no limit."""
    prompt_tokens_max: int
    """Longest prompt that fits the KV pool with one new token."""
    sequence_tokens_max: int
    """Longest prompt plus output that fits the KV pool."""


class Timing(msgspec.Struct, frozen=True, array_like=True):
    """Durations of a finished request, in seconds; 0 for a stage that was not reached."""

    queue_s: float = 0.0
    """Submit received to first prefill row."""
    prefill_s: float = 0.0
    """First prefill row to first token, recomputation included."""
    decode_s: float = 0.0
    """First token to last token."""
    device_s: float = 0.0
    """Of the time from Submit received to first token: how long the device computed, whatever."""


# ------------------------------------------------------------------ gateway → scheduler


class GatewayHello(msgspec.Struct, frozen=True, tag="hello"):
    """First word of a gateway."""

    revision: str
    vocabulary: Vocabulary


class Submit(msgspec.Struct, frozen=True, tag="submit"):
    """One request, validated and complete: everything the scheduler will ever need to know of it.

    Refused (see `Failed`) or admitted (see `Admitted`), in either case exactly once.
    """

    handle: Handle
    """Of candidate 0; candidate i has ``handle + i``."""
    request_id: str
    tenant: str
    prompt: bytes
    sampling: Sampling
    """`seed` is that of candidate 0, drawn by the gateway if the client sent none."""
    stopping: Stopping
    received_s: float
    """When the gateway received the request."""
    candidate_count: int = 1
    prior: tuple[bytes, ...] = ()
    """Tokens already generated, per candidate; their positions follow the prompt."""
    priority: int = 0
    """Larger is sooner."""
    queue_timeout_s: float | None = None
    """Longest time from admission to the first prefill row."""
    deadline_s: float | None = None
    """The gRPC deadline, absolute."""
    time_limit_s: float | None = None
    """Soft limit, a duration from admission; ends with TIME_LIMIT."""
    session_id: str = ""
    cache_salt: str = ""
    bypass_prefix_cache: bool = False
    resume_key: bytes = b""
    detached_ttl_s: float = 0.0
    context: bytes = b""
    """Opaque to the scheduler: what a gateway needs to render the log; returned on attachment."""


class Cancel(msgspec.Struct, frozen=True, tag="cancel"):
    """Ends sequences of this gateway; unknown handles are ignored (they have just ended)."""

    handles: tuple[Handle, ...]
    cause: CancelCause


class CancelById(msgspec.Struct, frozen=True, tag="cancel_by_id"):
    """CancelGenerate: ends requests of a tenant, whichever gateway holds them."""

    call: int
    """Chosen by the gateway; names the reply."""
    tenant: str
    request_ids: tuple[str, ...]


class GetStats(msgspec.Struct, frozen=True, tag="get_stats"):
    call: int


class GatewayGoodbye(msgspec.Struct, frozen=True, tag="goodbye"):
    """Last word of a gateway that stops; what it still holds is cancelled."""


GatewayWord = GatewayHello | Submit | Cancel | CancelById | GetStats | GatewayGoodbye


# ------------------------------------------------------------------ scheduler → gateway


class Admitted(msgspec.Struct, frozen=True, array_like=True, tag="admitted"):
    """The request has its place in the queue; from here exactly one terminal event a sequence."""

    handle: Handle


class PrefillStarted(msgspec.Struct, frozen=True, array_like=True, tag="prefill"):
    handle: Handle
    queue_s: float


class Finished(msgspec.Struct, frozen=True, array_like=True, tag="finished"):
    """Terminal: the sequence ended well. Its last token stands in the same or an earlier update."""

    handle: Handle
    reason: FinishReason
    completion_tokens: int
    """All generated tokens, those whose text a stop string cuts off included."""
    cached_prompt_tokens: int
    preemption_count: int
    timing: Timing
    stop_token: int | None = None
    stop_string_index: int | None = None


class Failed(msgspec.Struct, frozen=True, array_like=True, tag="failed"):
    """Terminal: refused before admission (no `Admitted` was sent) or failed after it."""

    handle: Handle
    reason: Reason
    message: str
    metadata: dict[str, str] = {}
    retry_after_s: float | None = None


Event = Admitted | PrefillStarted | Finished | Failed


class Update(msgspec.Struct, frozen=True, tag="update"):
    """Everything that one step, or one batch of words, changed for one gateway.

    Apply the tokens first, then the events in order. ``handles[k]`` got ``tokens[k]``; a sequence
    gets 0..m tokens in an update, in order.
    """

    handles: bytes = b""
    """int64 little-endian."""
    tokens: bytes = b""
    """int32 little-endian, as many as handles."""
    events: tuple[Event, ...] = ()


class Welcome(msgspec.Struct, frozen=True, tag="welcome"):
    """Answer to `GatewayHello`, sent once an executor is attached; again if the facts change."""

    instance_id: str
    facts: ModelFacts
    limits: Limits


class StateChanged(msgspec.Struct, frozen=True, tag="state"):
    """Sent after `GatewayHello` and on each change."""

    state: ServerState


class Cancelled(msgspec.Struct, frozen=True, tag="cancelled"):
    """Answer to `CancelById`: the ids that were live, in request order."""

    call: int
    request_ids: tuple[str, ...]


class Stats(msgspec.Struct, frozen=True):
    """One snapshot of the scheduler. Gauges first, then totals since start."""

    state: ServerState
    running_requests: int
    queued_requests: int
    queued_tokens: int
    oldest_queued_s: float
    blocks_active: int
    """Blocks held by sequences or waiting for their fence."""
    blocks_free: int
    seats_active: int
    requests_total: int
    requests_rejected_total: int
    requests_failed_total: int
    requests_cancelled_total: int
    prompt_tokens_total: int
    cached_prompt_tokens_total: int
    generated_tokens_total: int
    preemptions_total: int
    steps_total: int
    generated_tokens_per_second: float
    """Over the last 10 s."""
    mean_step_s: float
    """Over the last 10 s; 0 if there was none."""
    last_step_s: float
    """Age of the last result; 0 if there was none."""
    device_time: DeviceTime = DeviceTime()
    step_counts: tuple[int, ...] = (0,) * (len(STEP_BOUNDS_US) + 1)
    """Tokens since start but first ones, by how long the device computed the step of each."""


class StatsReply(msgspec.Struct, frozen=True, tag="stats"):
    call: int
    stats: Stats


class Beat(msgspec.Struct, frozen=True, tag="beat"):
    """Sent each second when nothing else was; a gateway that hears nothing for long has lost us."""


SchedulerUpdate = Update | Welcome | StateChanged | Cancelled | StatsReply | Beat


# ------------------------------------------------------------------ executor ↔ scheduler


class ExecutorHello(msgspec.Struct, frozen=True, array_like=True, tag="hello"):
    """First word of an executor whose model is loaded and whose KV pool stands."""

    facts: ModelFacts
    pid: int


class StepDone(msgspec.Struct, frozen=True, array_like=True, tag="done"):
    """The result of a step is in its result slot (step % 2). Acknowledges the step."""

    epoch: Epoch
    step: StepNumber


class ExecutorReady(msgspec.Struct, frozen=True, array_like=True, tag="ready"):
    """Regions mapped, seat table uploaded; steps may come."""

    epoch: Epoch


class ExecutorFault(msgspec.Struct, frozen=True, array_like=True, tag="fault"):
    """The executor broke and is about to exit; all of the epoch's steps in flight are lost."""

    epoch: Epoch
    message: str


ExecutorWord = ExecutorHello | ExecutorReady | StepDone | ExecutorFault


class Attach(msgspec.Struct, frozen=True, array_like=True, tag="attach"):
    """Answer to `ExecutorHello`: the epoch, and how large the regions are.

    The scheduler has created `frames` and `seats` in the run folder; the executor creates
    `results`. All three are named by epoch (see `rendezvous`).
    """

    epoch: Epoch
    row_max: int
    token_max: int
    assignment_max: int
    seat_count: int
    """Seats of the table, the scratch seat included."""
    seat_block_max: int
    """Length of a seat's block table."""


class StepReady(msgspec.Struct, frozen=True, array_like=True, tag="step"):
    """The frame of a step is in its slot (step % 2)."""

    epoch: Epoch
    step: StepNumber


class Stop(msgspec.Struct, frozen=True, array_like=True, tag="stop"):
    """No further step will come; finish those accepted and exit."""


SchedulerWord = Attach | StepReady | Stop
