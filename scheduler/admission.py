"""Whether a request may join, and as what: every limit by name, each with its typed refusal.

Pure; the core asks once a `Submit`. Knows limits and counts, nothing of seats or steps.
"""

from __future__ import annotations

import numpy as np

from gapless.protos.messages import Failed, Submit
from gapless.protos.reasons import Reason
from gapless.protos.stops import StopMatcher, StopStrings
from gapless.scheduler.config import CoreConfig, GatewayIndex
from gapless.scheduler.queues import WaitingQueue
from gapless.scheduler.request import Sequence

RETRY_AFTER_MIN_S = 0.1
RETRY_AFTER_MAX_S = 10.0
RETRY_AFTER_UNKNOWN_S = 1.0
"""When nothing has ended lately, so that nobody can say."""
DRAINING_RETRY_AFTER_S = 1.0
"""Another server may take the request at once; this one will not come back sooner."""


def refusal_of(
    word: Submit,
    config: CoreConfig,
    *,
    is_draining: bool,
    is_id_in_use: bool,
    waiting: WaitingQueue,
    ended_per_second: float,
) -> Failed | None:
    """Why `word` is refused; None if it is admitted."""
    if is_draining:
        return Failed(
            word.handle,
            Reason.DRAINING,
            "the server is draining",
            retry_after_s=DRAINING_RETRY_AFTER_S,
        )
    if is_id_in_use:
        return Failed(
            word.handle,
            Reason.REQUEST_ID_IN_USE,
            f"request id {word.request_id!r} belongs to a live request",
        )
    return _capacity_refusal(word, config) or _queue_refusal(
        word, config, waiting, ended_per_second
    )


def sequence_of(
    word: Submit, config: CoreConfig, gateway: GatewayIndex, arrival: int, now: float
) -> Sequence:
    """The one sequence of an admitted request; tokens generated before count as known."""
    assert len(word.prior) <= 1, "one sequence a request"
    stopping = word.stopping
    prompt_length = len(word.prompt) // 4
    room_end = config.sequence_tokens_max
    has_strings = bool(stopping.stop_strings)
    return Sequence(
        gateway=gateway,
        handle=word.handle,
        request_id=word.request_id,
        tenant=word.tenant,
        priority=word.priority,
        arrival=arrival,
        sampling=word.sampling,
        stopping=stopping,
        prompt_length=prompt_length,
        limit_length=min(prompt_length + stopping.max_new_tokens, room_end),
        matcher=StopMatcher(StopStrings(stopping.stop_strings)) if has_strings else None,
        tokens=np.frombuffer(b"".join((word.prompt, *word.prior)), np.int32),
        admitted_s=now,
        queued_s=now,
    )


def _capacity_refusal(word: Submit, config: CoreConfig) -> Failed | None:
    """A sequence that would not fit the pool if it were alone there."""
    prompt_tokens = len(word.prompt) // 4
    stopping = word.stopping
    assert prompt_tokens >= 1, "a prompt has tokens"
    assert stopping.max_new_tokens >= 1, stopping.max_new_tokens
    # "All the room there is" fits whatever room there is, if one new token does.
    new_tokens = 1 if stopping.max_new_tokens_is_room else stopping.max_new_tokens
    if prompt_tokens + new_tokens <= config.sequence_tokens_max:
        return None
    prompt_tokens_max = max(0, config.sequence_tokens_max - new_tokens)
    return Failed(
        word.handle,
        Reason.KV_CAPACITY_EXCEEDED,
        f"a prompt of {prompt_tokens} tokens and {new_tokens} new ones will never fit the KV pool "
        f"of this server, which holds {config.sequence_tokens_max} tokens of a sequence",
        {"promptTokens": str(prompt_tokens), "maxPromptTokens": str(prompt_tokens_max)},
    )


def _queue_refusal(
    word: Submit, config: CoreConfig, waiting: WaitingQueue, ended_per_second: float
) -> Failed | None:
    tokens = waiting.tokens + (len(word.prompt) + sum(map(len, word.prior))) // 4
    if len(waiting) >= config.queued_max:
        message = f"{len(waiting)} requests wait, as many as may"
    elif config.queued_tokens_max and len(waiting) and tokens > config.queued_tokens_max:
        message = f"{tokens} tokens would wait, {config.queued_tokens_max} may"
    else:
        return None
    retry_after_s = 1 / ended_per_second if ended_per_second else RETRY_AFTER_UNKNOWN_S
    return Failed(
        word.handle,
        Reason.QUEUE_FULL,
        message,
        retry_after_s=min(max(retry_after_s, RETRY_AFTER_MIN_S), RETRY_AFTER_MAX_S),
    )
