"""What the client's calls return: frozen values, no protobuf in sight.

Read from messages by the functions at the end of each class; called by `client` and `stream` only.
Must not know how a call is made.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from types import MappingProxyType
from typing import Self

from google.protobuf import duration_pb2, json_format

from gapless.protos import admin_pb2, inference_pb2


def _seconds(duration: duration_pb2.Duration) -> float:
    return duration.ToTimedelta().total_seconds()


def _precise_seconds(duration: duration_pb2.Duration) -> float:
    return duration.ToNanoseconds() / 1e9


def _sums(columns: Iterable[Sequence[int]]) -> tuple[int, ...]:
    """Element by element, over those that are there."""
    return tuple(map(sum, zip(*(counts for counts in columns if counts), strict=True)))


class FinishReason(enum.Enum):
    """Why a candidate ended."""

    STOP_TOKEN = "STOP_TOKEN"
    STOP_STRING = "STOP_STRING"
    MAX_NEW_TOKENS = "MAX_NEW_TOKENS"
    CONTEXT_LENGTH = "CONTEXT_LENGTH"
    TIME_LIMIT = "TIME_LIMIT"
    CANCELLED = "CANCELLED"
    CONSTRAINT_COMPLETE = "CONSTRAINT_COMPLETE"
    UNKNOWN = "UNKNOWN"
    """A reason that this client is too old to know."""

    @classmethod
    def read(cls, number: int) -> FinishReason:
        value = inference_pb2.FinishReason.DESCRIPTOR.values_by_number.get(number)
        name = value.name.removeprefix("FINISH_REASON_") if value is not None else "UNKNOWN"
        return cls.__members__.get(name, cls.UNKNOWN)


@dataclass(frozen=True, slots=True)
class Finish:
    """The end of a candidate."""

    reason: FinishReason
    stop_token_id: int | None = None
    """The token that matched, with STOP_TOKEN."""
    stop_string: str | None = None
    """The string that matched, with STOP_STRING."""

    @classmethod
    def read(cls, message: inference_pb2.CandidateFinish) -> Self:
        matched = message.WhichOneof("matched")
        return cls(
            FinishReason.read(message.reason),
            message.stop_token_id if matched == "stop_token_id" else None,
            message.stop_string if matched == "stop_string" else None,
        )


@dataclass(frozen=True, slots=True)
class Delta:
    """New tokens of one candidate, in order, each exactly once."""

    candidate_index: int
    first_token_index: int
    """Index in the output of the first token covered."""
    token_count: int
    text: str
    """Whole characters; may be empty."""
    token_ids: tuple[int, ...] = ()
    """`token_count` ids, if asked for by `return_token_ids`."""
    finish: Finish | None = None
    """Set in the last delta of the candidate."""

    @classmethod
    def read(cls, message: inference_pb2.GenerationDelta) -> Self:
        return cls(
            message.candidate_index,
            message.first_token_index,
            message.token_count,
            message.text,
            tuple(message.token_ids),
            Finish.read(message.finish) if message.HasField("finish") else None,
        )


@dataclass(frozen=True, slots=True)
class Started:
    """First on each stream: the request was admitted."""

    request_id: str
    model: str
    prompt_tokens: int
    resumable: bool

    @classmethod
    def read(cls, message: inference_pb2.GenerationStarted) -> Self:
        return cls(message.request_id, message.model, message.prompt_tokens, message.resumable)


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts over all candidates."""

    prompt_tokens: int
    cached_prompt_tokens: int
    completion_tokens: int


@dataclass(frozen=True, slots=True)
class Timing:
    """Times of one request as the gateway saw them, in seconds."""

    received_time: datetime
    queue_s: float
    prefill_s: float
    time_to_first_token_s: float
    decode_s: float
    total_s: float
    device_s: float
    """How long the device computed, for this request or others, before its first token."""
    preemption_count: int


@dataclass(frozen=True, slots=True)
class Completed:
    """Last on each stream that ends well."""

    usage: Usage
    timing: Timing
    seed: int
    """The seed in force, also if none was sent."""

    @classmethod
    def read(cls, message: inference_pb2.GenerationCompleted) -> Self:
        usage, timing = message.usage, message.timing
        return cls(
            Usage(usage.prompt_tokens, usage.cached_prompt_tokens, usage.completion_tokens),
            Timing(
                timing.received_time.ToDatetime(tzinfo=UTC),
                _seconds(timing.queue_duration),
                _seconds(timing.prefill_duration),
                _seconds(timing.time_to_first_token),
                _seconds(timing.decode_duration),
                _seconds(timing.total_duration),
                _seconds(timing.device_before_first_token),
                timing.preemption_count,
            ),
            message.seed,
        )


@dataclass(frozen=True, slots=True)
class Tokenization:
    """A prompt as the model would see it."""

    token_count: int
    token_ids: tuple[int, ...]
    rendered_text: str
    offsets: tuple[tuple[int, int], ...]
    """Start and end of each token in `rendered_text`, in UTF-8 bytes; empty unless asked for."""

    @classmethod
    def read(cls, message: inference_pb2.TokenizeResponse) -> Self:
        offsets = zip(message.start_bytes, message.end_bytes, strict=True)
        return cls(
            message.token_count,
            tuple(message.token_ids),
            message.rendered_text,
            tuple(offsets),
        )


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """One served model: its limits and defaults."""

    name: str
    aliases: tuple[str, ...]
    architecture: str
    revision: str
    context_length: int
    max_prompt_tokens: int
    max_prompt_bytes: int
    vocab_size: int
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    has_chat_template: bool
    default_sampling: Mapping[str, object]
    """What an unset sampling option means, by its name; absent = the default of the API."""
    default_max_new_tokens: int

    @classmethod
    def read(cls, message: inference_pb2.Model) -> Self:
        defaults = json_format.MessageToDict(
            message.default_sampling, preserving_proto_field_name=True
        )
        return cls(
            message.name,
            tuple(message.aliases),
            message.architecture,
            message.revision,
            message.context_length,
            message.max_prompt_tokens,
            message.max_prompt_bytes,
            message.vocab_size,
            message.bos_token_id if message.HasField("bos_token_id") else None,
            tuple(message.eos_token_ids),
            message.has_chat_template,
            MappingProxyType(defaults),
            message.default_max_new_tokens,
        )


class HealthStatus(enum.Enum):
    """Whether a `generate` would be admitted now."""

    UNKNOWN = 0
    SERVING = 1
    NOT_SERVING = 2
    SERVICE_UNKNOWN = 3


@dataclass(frozen=True, slots=True)
class ServerStats:
    """One snapshot of a server, from its admin address."""

    state: str
    """STARTING, SERVING, DRAINING or FAILED."""
    running_requests: int
    queued_requests: int
    open_streams: int
    requests_total: int
    requests_rejected_total: int
    requests_failed_total: int
    requests_cancelled_total: int
    prompt_tokens_total: int
    generated_tokens_total: int
    preemptions_total: int
    generated_tokens_per_second: float
    kv_blocks_active: int
    """Over all executors, as everything below."""
    kv_blocks_free: int
    device_active_s: float
    """Time within steps, since start."""
    device_gaps_s: Mapping[str, float]
    """Time between steps since start, by cause; all but ``no_request`` are bubbles."""
    bubble_bounds_us: tuple[int, ...]
    """Upper bounds of the buckets of `bubble_counts`, each inclusive; the last has none."""
    bubble_counts: tuple[int, ...]
    """Steps since start, by how long the device had waited before them although there was work."""
    step_bounds_us: tuple[int, ...]
    """Upper bounds of the buckets of `step_token_counts`, likewise."""
    step_token_counts: tuple[int, ...]
    """Tokens since start but first ones, by how long the device computed the step of each."""

    @classmethod
    def read(cls, message: admin_pb2.Stats) -> Self:
        value = admin_pb2.ServerState.DESCRIPTOR.values_by_number.get(message.state)
        bubbles = [executor.bubble_histogram for executor in message.executors]
        steps = [executor.step_histogram for executor in message.executors]
        return cls(
            value.name.removeprefix("SERVER_STATE_") if value is not None else "UNKNOWN",
            message.running_requests,
            message.queued_requests,
            message.open_streams,
            message.requests_total,
            message.requests_rejected_total,
            message.requests_failed_total,
            message.requests_cancelled_total,
            message.prompt_tokens_total,
            message.generated_tokens_total,
            message.preemptions_total,
            message.generated_tokens_per_second,
            sum(executor.kv_blocks_active for executor in message.executors),
            sum(executor.kv_blocks_free for executor in message.executors),
            sum(_precise_seconds(executor.device_active) for executor in message.executors),
            MappingProxyType(
                {
                    field.name: sum(
                        _precise_seconds(getattr(executor.device_gaps, field.name))
                        for executor in message.executors
                    )
                    for field in admin_pb2.DeviceGaps.DESCRIPTOR.fields
                }
            ),
            next((tuple(each.upper_bounds_us) for each in bubbles if each.counts), ()),
            _sums([each.counts for each in bubbles]),
            next((tuple(each.upper_bounds_us) for each in steps if each.token_counts), ()),
            _sums([each.token_counts for each in steps]),
        )
