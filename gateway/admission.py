"""From a valid request and its tokens to `Submit`: what needs the scheduler's facts and limits.

Owns rule 2 (is anything admitted now?) and rule 34 (does it fit?) of the public API, and the
resolution of defaults that depend on the prompt's length.

Must not know: gRPC, text, sockets. Called by `generate`; what `refusal` says
is also the server's health.
"""

from __future__ import annotations

import dataclasses
from array import array
from collections.abc import Sequence

from gapless.gateway.failures import Failure, Violation
from gapless.gateway.parameters import StoppingRequest, unique
from gapless.gateway.validation import ValidGenerate
from gapless.protos.messages import (
    Handle,
    Limits,
    ModelFacts,
    ServerState,
    Stopping,
    Submit,
    Welcome,
)
from gapless.protos.reasons import Reason

TENANT = "default"
"""Owner of every request as long as callers are not told apart."""


def refusal(state: ServerState, welcome: Welcome | None, draining: bool) -> Failure | None:
    """Why nothing is admitted now; None if a Generate would be."""
    if draining or state is ServerState.DRAINING:
        return Failure(Reason.DRAINING, "this server is about to stop")
    if state is ServerState.FAILED:
        return Failure(Reason.NO_EXECUTOR, "no executor is healthy")
    if state is ServerState.STARTING or welcome is None:
        return Failure(Reason.STARTING, "the model is loading")
    return None


def fit(
    request: StoppingRequest,
    *,
    prompt_tokens: int,
    skip_special_tokens: bool,
    end_tokens: tuple[int, ...],
    default_max_new_tokens: int,
    facts: ModelFacts,
    limits: Limits,
) -> Stopping:
    """Rule 34, and the length in force. Raises Failure.

    Without max_new_tokens the output may take the default, or the room left if that is less.
    """
    tokens_max = min(facts.context_length, limits.sequence_tokens_max)
    room = tokens_max - prompt_tokens
    if request.max_new_tokens is None:
        max_new_tokens = min(default_max_new_tokens, room)
    else:
        max_new_tokens = request.max_new_tokens
    least = max(1, max_new_tokens)
    if prompt_tokens + least > facts.context_length:
        raise _too_long(
            Reason.CONTEXT_LENGTH_EXCEEDED,
            "the context of the model",
            prompt_tokens,
            least,
            facts.context_length,
            {"maxTokens": str(facts.context_length)},
        )
    if prompt_tokens > limits.prompt_tokens_max or least > room:
        raise _too_long(
            Reason.KV_CAPACITY_EXCEEDED,
            "the KV pool of this deployment",
            prompt_tokens,
            least,
            tokens_max,
            {"maxPromptTokens": str(min(limits.prompt_tokens_max, tokens_max - least))},
        )
    if request.min_new_tokens > max_new_tokens:
        description = f"is {request.min_new_tokens}, must be at most {max_new_tokens}"
        violation = Violation("stopping.min_new_tokens", description)
        raise Failure(
            Reason.INVALID_FIELD, f"{violation.field}: {description}", violations=(violation,)
        )
    return Stopping(
        max_new_tokens=max_new_tokens,
        min_new_tokens=request.min_new_tokens,
        stop_tokens=unique((*(() if request.ignore_eos else end_tokens), *request.stop_tokens)),
        stop_strings=request.stop_strings,
        skip_special_tokens=skip_special_tokens,
        max_new_tokens_is_room=request.max_new_tokens is None and room < default_max_new_tokens,
    )


def _too_long(
    reason: Reason,
    what: str,
    prompt_tokens: int,
    new_tokens: int,
    tokens_max: int,
    metadata: dict[str, str],
) -> Failure:
    if prompt_tokens >= tokens_max:
        field = "prompt"
        message = f"the prompt has {prompt_tokens} tokens"
    else:
        field = "stopping.max_new_tokens"
        message = f"the prompt has {prompt_tokens} tokens and {new_tokens} are to be generated"
    message += f", {what} holds {tokens_max}"
    return Failure(
        reason,
        message,
        metadata={"promptTokens": str(prompt_tokens), **metadata},
        violations=(Violation(field, message),),
    )


@dataclasses.dataclass(frozen=True, slots=True)
class Times:
    """When a request came and when it has to be over, on CLOCK_MONOTONIC."""

    received_s: float
    deadline_s: float


def submission(
    request: ValidGenerate,
    *,
    handle: Handle,
    request_id: str,
    token_ids: Sequence[int],
    stopping: Stopping,
    times: Times,
) -> Submit:
    """The complete word for the scheduler."""
    scheduling = request.scheduling
    return Submit(
        handle=handle,
        request_id=request_id,
        tenant=TENANT,
        prompt=array("i", token_ids).tobytes(),
        sampling=request.sampling,
        stopping=stopping,
        received_s=times.received_s,
        priority=scheduling.priority,
        queue_timeout_s=scheduling.queue_timeout_s,
        deadline_s=times.deadline_s,
        time_limit_s=request.stopping.time_limit_s,
        session_id=scheduling.session_id,
        cache_salt=scheduling.cache_salt or TENANT,
        bypass_prefix_cache=scheduling.bypass_prefix_cache,
    )
