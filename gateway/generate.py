"""One Generate call, from its request to its last message.

::

    validate ─▶ prepare ─▶ fit ─▶ submit ─▶ prefill begins ─▶ started ─▶ deltas ─▶ completed

Owns the order of messages on a stream and what a cancelled, failed or slow one does. Nothing is
sent before the scheduler has admitted the request and planned its first step; what precedes the
first token goes out then, while the device computes, so that the token itself need not wait for it.
Whatever ends the call, the stream is closed and the scheduler told at once if the sequence is still
alive there.

Must not know: rules of fields, sockets. Called by the servicer.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from typing import Any, Final

import grpc.aio

from gapless.gateway import admission, failures
from gapless.gateway.admission import Times
from gapless.gateway.config import Config
from gapless.gateway.failures import Failure, Violation
from gapless.gateway.link import Link, scheduler_lost
from gapless.gateway.model import ServedModel
from gapless.gateway.preparation import LARGE_REQUEST_BYTES, Preparation, Prepared
from gapless.gateway.prompts import PromptRules
from gapless.gateway.record import Record
from gapless.gateway.rendering import Renderer, TextOptions
from gapless.gateway.streams import Stream, Streams
from gapless.gateway.validation import Rules, ValidGenerate, validate_generate
from gapless.protos import inference_pb2
from gapless.protos.messages import CancelCause, Finished, Stopping, Submit, Welcome
from gapless.protos.reasons import Reason
from gapless.protos.stops import StopStrings

DELTA_TOKENS_MAX: Final = 4096
"""Most tokens in one delta, so that no message comes near 1 MiB."""
PROMPT_SLICE_TOKENS_MAX: Final = 65_536
"""Most ids in one PromptSlice, for the same reason."""

_LOG = logging.getLogger("gapless.gateway")


class Generation:
    """Runs Generate calls. One object a gateway; it holds nothing of a single call."""

    def __init__(
        self,
        config: Config,
        model: ServedModel,
        link: Link,
        streams: Streams,
        preparation: Preparation,
    ) -> None:
        self._config = config
        self._model = model
        self._link = link
        self._streams = streams
        self._preparation = preparation
        self.draining = False
        """Set once, when the gateway is about to stop: nothing is admitted any more."""

    def refusal(self) -> Failure | None:
        """Why a Generate would not be admitted now; None if it would."""
        if self._link.is_lost:
            return scheduler_lost()
        return admission.refusal(self._link.state, self._link.welcome, self.draining)

    def rules(self) -> Rules:
        """What validation depends on. Raises Failure before the executor is known."""
        return rules_of(self._config, self._model, require_welcome(self._link))

    async def run(self, request: inference_pb2.GenerateRequest, context: Any) -> None:
        """Serves one call; writes to `context`. Raises Failure, and CancelledError as it came."""
        record = Record(request.request_id)
        try:
            await self._run(request, context, record)
            record.outcome = "OK"
        except Failure as failure:
            record.outcome = failure.reason.value
            raise
        except asyncio.CancelledError:
            record.outcome = "CANCELLED"
            raise
        except grpc.aio.BaseError:
            record.outcome = "CANCELLED"  # the call is over: the client went, or the server stops
            raise
        except Exception as error:
            _LOG.exception("request %r failed", record.request_id)
            raise failures.engine_error(record.request_id) from error
        finally:
            record.log(self._model.name)

    async def _run(
        self, request: inference_pb2.GenerateRequest, context: Any, record: Record
    ) -> None:
        refusal = self.refusal()
        if refusal is not None:
            raise refusal
        welcome = require_welcome(self._link)
        times = self._times(context, record)
        valid = await self._validate(request, record)
        prepared = await self._preparation.prepare(valid.prompt)
        record.prompt_tokens = len(prepared.token_ids)
        if not prepared.token_ids:
            raise failures.invalid((Violation("prompt", "comes to no tokens at all"),))
        stopping = admission.fit(
            valid.stopping,
            prompt_tokens=len(prepared.token_ids),
            skip_special_tokens=valid.output.skip_special_tokens,
            end_tokens=self._model.end_tokens,
            default_max_new_tokens=self._config.default_max_new_tokens,
            facts=welcome.facts,
            limits=welcome.limits,
        )
        refusal = self.refusal()  # preparing may have taken a while
        if refusal is not None:
            raise refusal
        record.submitted_s = time.monotonic()
        submit = admission.submission(
            valid,
            handle=self._streams.draw_handle(),
            request_id=record.request_id,
            token_ids=prepared.token_ids,
            stopping=stopping,
            times=times,
        )
        stream = self._streams.open(submit, valid.output.flush_interval_s)
        cause = CancelCause.CLIENT
        try:
            await _Call(self._model, record, valid, prepared, submit, stream, context).stream()
        except asyncio.CancelledError:
            if not stream.too_slow:
                raise
            cause = CancelCause.SLOW_CONSUMER
            raise Failure(
                Reason.SLOW_CONSUMER,
                f"no message was taken for {self._config.slow_consumer_s:g} s",
                metadata={"generatedTokens": str(len(stream.tokens))},
            ) from None
        finally:
            self._streams.close(stream, cause)

    def _times(self, context: Any, record: Record) -> Times:
        """Raises Failure if no time is left."""
        remaining_s = context.time_remaining()
        if remaining_s is not None and remaining_s <= 0:
            raise Failure(Reason.DEADLINE, "the deadline has passed")
        limit_s = self._config.deadline_max_s
        allowed_s = limit_s if remaining_s is None else min(remaining_s, limit_s)
        return Times(record.received_s, record.received_s + allowed_s)

    async def _validate(
        self, request: inference_pb2.GenerateRequest, record: Record
    ) -> ValidGenerate:
        rules = self.rules()
        seed = secrets.randbits(64)
        if request.ByteSize() > LARGE_REQUEST_BYTES:
            valid = await self._preparation.run(lambda: validate_generate(request, rules, seed))
        else:
            valid = validate_generate(request, rules, seed)
        record.request_id = valid.request_id or secrets.token_hex(16)
        record.labels = valid.labels
        return valid


class _Call:
    """The part of one call that has a stream."""

    def __init__(
        self,
        model: ServedModel,
        record: Record,
        valid: ValidGenerate,
        prepared: Prepared,
        submit: Submit,
        stream: Stream,
        context: Any,
    ) -> None:
        self._model = model
        self._record = record
        self._valid = valid
        self._prepared = prepared
        self._submit = submit
        self._stream = stream
        self._context = context
        self._renderer = (
            Renderer(text_options(model, valid, submit.stopping)) if valid.output.text else None
        )

    async def stream(self) -> None:
        """Sends everything; returns when `completed` has gone. Raises Failure."""
        stream = self._stream
        await stream.wait_prefilling()
        if not stream.tokens:
            self._raise_failure()  # before the first message: the client may simply try again
        await self._write_headers()
        await self._write(self._started())
        if self._valid.output.prompt_token_ids:
            await self._write_prompt()
        finished: Finished | None = None
        while finished is None:
            await stream.wait_due()
            tokens = stream.take(DELTA_TOKENS_MAX)
            if stream.ended and stream.taken == len(stream.tokens):
                if not tokens:
                    self._raise_failure()
                finished = stream.finished
            await self._write(self._delta(tokens, finished))
            self._record.delta_sent(len(tokens))
        await self._write(self._completed(finished))

    def _raise_failure(self) -> None:
        """Ends a stream that failed, once all of its tokens are on their way."""
        stream = self._stream
        if stream.refused is not None:
            failure = failures.from_scheduler(stream.refused, self._record.request_id)
        elif stream.lost:
            failure = scheduler_lost()
        else:
            return
        if stream.tokens:
            failure.metadata.setdefault("generatedTokens", str(len(stream.tokens)))
        if failure.reason is Reason.ENGINE_ERROR:
            failure.metadata.setdefault("requestId", self._record.request_id)
        raise failure

    async def _write_headers(self) -> None:
        """Sends the headers alone: no window of the client holds those back.

        With a first message that the client does not take they would stay unsent, and gRPC lets
        no call end before its headers are on their way.
        """
        stream = self._stream
        stream.write_since_s = time.monotonic()
        await self._context.send_initial_metadata(())
        stream.write_since_s = None

    async def _write(self, message: inference_pb2.GenerateResponse) -> None:
        """Waits while the client is slow, for as long as `Streams.end_slow` lets it."""
        stream = self._stream
        stream.write_since_s = time.monotonic()
        await self._context.write(message)
        stream.write_since_s = None

    def _started(self) -> inference_pb2.GenerateResponse:
        return inference_pb2.GenerateResponse(
            started=inference_pb2.GenerationStarted(
                request_id=self._record.request_id,
                model=self._model.name,
                prompt_tokens=len(self._prepared.token_ids),
                attachment=1,
            )
        )

    async def _write_prompt(self) -> None:
        token_ids = self._prepared.token_ids
        for first in range(0, len(token_ids), PROMPT_SLICE_TOKENS_MAX):
            message = inference_pb2.GenerateResponse()
            message.prompt.first_token_index = first
            message.prompt.token_ids.extend(token_ids[first : first + PROMPT_SLICE_TOKENS_MAX])
            await self._write(message)

    def _delta(self, tokens: Any, finished: Finished | None) -> inference_pb2.GenerateResponse:
        message = inference_pb2.GenerateResponse()
        delta = message.delta
        delta.first_token_index = self._stream.taken - len(tokens)
        delta.token_count = len(tokens)
        if self._renderer is not None:
            text = self._renderer.push(tokens)
            if finished is not None:
                text += self._renderer.finish(finished.reason)
            delta.text = text
        if self._valid.output.token_ids:
            delta.token_ids.extend(tokens)
        if finished is not None:
            finish = delta.finish
            finish.reason = inference_pb2.FinishReason.ValueType(finished.reason.value)
            if finished.stop_token is not None:
                finish.stop_token_id = finished.stop_token
            elif finished.stop_string_index is not None:
                matched = self._submit.stopping.stop_strings[finished.stop_string_index]
                finish.stop_string = matched.decode()
        return message

    def _completed(self, finished: Finished) -> inference_pb2.GenerateResponse:
        record, timing = self._record, finished.timing
        assert finished.completion_tokens == len(self._stream.tokens), (
            finished.completion_tokens,
            len(self._stream.tokens),
        )
        record.finish = finished.reason.name
        record.queue_s = record.submitted_s - record.received_s + timing.queue_s
        message = inference_pb2.GenerateResponse()
        completed = message.completed
        completed.seed = self._submit.sampling.seed
        completed.usage.prompt_tokens = len(self._prepared.token_ids)
        completed.usage.cached_prompt_tokens = finished.cached_prompt_tokens
        completed.usage.completion_tokens = finished.completion_tokens
        times = completed.timing
        times.received_time.FromNanoseconds(record.received_wall_ns)
        times.queue_duration.FromNanoseconds(_ns(record.queue_s))
        times.prefill_duration.FromNanoseconds(_ns(timing.prefill_s))
        times.decode_duration.FromNanoseconds(_ns(timing.decode_s))
        times.device_before_first_token.FromNanoseconds(_ns(timing.device_s))
        times.time_to_first_token.FromNanoseconds(_ns(record.first_delta_s or 0.0))
        times.total_duration.FromNanoseconds(_ns(time.monotonic() - record.received_s))
        times.preemption_count = finished.preemption_count
        return message


def require_welcome(link: Link) -> Welcome:
    """The scheduler's facts and limits. Raises Failure before they are known."""
    if link.welcome is None:
        raise Failure(Reason.STARTING, "the model is loading")
    return link.welcome


def rules_of(config: Config, model: ServedModel, welcome: Welcome) -> Rules:
    """What validation depends on."""
    return Rules(
        model_name=model.name,
        prompt=PromptRules(
            vocab_size=welcome.facts.vocab_size,
            context_length=welcome.facts.context_length,
            prompt_bytes_max=config.prompt_bytes_max,
            has_chat_template=model.template is not None,
            chat_template_allowed=config.allow_chat_template,
        ),
        default_sampling=model.default_sampling,
        flush_interval_ms=config.flush_interval_ms,
    )


def text_options(model: ServedModel, valid: ValidGenerate, stopping: Stopping) -> TextOptions:
    """What of the log is text."""
    visible = model.tokenizer.token_bytes.visible(skip_special_tokens=stopping.skip_special_tokens)
    return TextOptions(
        pieces=visible,
        automaton=StopStrings(stopping.stop_strings) if stopping.stop_strings else None,
        include_stop_in_text=valid.stopping.include_stop_in_text,
        min_new_tokens=stopping.min_new_tokens,
        stop_tokens=frozenset(stopping.stop_tokens),
    )


def _ns(duration_s: float) -> int:
    return round(duration_s * 1e9)
