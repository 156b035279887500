"""Prompts to tokens: chat templates and tokenising, off the event loop where they take long.

Owns the threads and how many requests may wait for them; more are refused, not piled up. A short
prompt takes less time than the way to a thread and back, and is prepared at once.

Must not know: gRPC, the scheduler. Called by `generate` and the servicer.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar, cast

from gapless.gateway import failures
from gapless.gateway.failures import Failure, Violation
from gapless.gateway.model import ServedModel
from gapless.gateway.prompts import PromptRequest
from gapless.gateway.templates import PromptText, TemplateFailed
from gapless.protos.reasons import Reason

LARGE_REQUEST_BYTES = 64 * 1024
"""A request of more bytes is validated in a thread as well."""
SHORT_PROMPT_BYTES = 2048
"""A prompt of at most so many bytes (characters, if it is one text) needs no thread: it is tokens
in about half a millisecond."""

_T = TypeVar("_T")


@dataclasses.dataclass(frozen=True, slots=True)
class Prepared:
    """A prompt as the model reads it."""

    token_ids: Sequence[int]
    text: str
    """What was tokenised; empty for a prompt of token ids."""
    start_bytes: Sequence[int]
    end_bytes: Sequence[int]


class Preparation:
    """Bounded work off the event loop."""

    def __init__(self, model: ServedModel, *, threads: int, preparing_max: int) -> None:
        self._model = model
        self._preparing_max = preparing_max
        self._preparing = 0
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="prepare")

    async def run(self, work: Callable[[], _T]) -> _T:
        """Runs `work` in a thread. Raises Failure if too many wait already.

        Work whose caller has gone is not begun, but holds its place until a thread comes to it:
        its request is in memory until then, so callers who come and go cannot pile them up.
        """
        if self._preparing >= self._preparing_max:
            raise Failure(
                Reason.QUEUE_FULL, f"{self._preparing} requests wait to be tokenised already"
            )
        wanted = True
        self._preparing += 1
        future = asyncio.get_running_loop().run_in_executor(
            self._pool, lambda: work() if wanted else None
        )
        future.add_done_callback(self._done)
        try:
            prepared = await asyncio.shield(future)
        except asyncio.CancelledError:
            wanted = False
            raise
        return cast(_T, prepared)

    async def prepare(self, prompt: PromptRequest, *, with_offsets: bool = False) -> Prepared:
        """Renders and tokenises; the result may have no tokens.

        Raises Failure: the template refuses the chat, or too many wait.
        """
        if prompt.token_ids is not None:
            token_ids = prompt.token_ids
            if prompt.truncate_to_last_tokens is not None:
                token_ids = token_ids[-prompt.truncate_to_last_tokens :]
            return Prepared(token_ids, "", (), ())
        if _is_short(prompt):
            return self._prepare(prompt, with_offsets)
        return await self.run(lambda: self._prepare(prompt, with_offsets))

    def close(self) -> None:
        """Gives the threads back; what waits is dropped."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _done(self, _future: asyncio.Future[Any]) -> None:
        self._preparing -= 1

    def _prepare(self, prompt: PromptRequest, with_offsets: bool) -> Prepared:
        if prompt.chat is not None:
            assert self._model.template is not None, "validated: the model has a chat template"
            try:
                text = self._model.template.render(prompt.chat)
            except TemplateFailed as error:
                violation = Violation("prompt.chat", str(error))
                raise failures.invalid((violation,), Reason.TEMPLATE_ERROR) from error
        else:
            assert prompt.text is not None, "a prompt has one form"
            text = PromptText(prompt.text)
        encoded = self._model.tokenizer.encode(
            text,
            add_special_tokens=prompt.add_special_tokens,
            truncate_to_last_tokens=prompt.truncate_to_last_tokens,
            with_offsets=with_offsets,
        )
        return Prepared(encoded.token_ids, text.text, encoded.start_bytes, encoded.end_bytes)


def _is_short(prompt: PromptRequest) -> bool:
    """A template of the caller's own is a program of unknown length."""
    if prompt.chat is None:
        assert prompt.text is not None, "a prompt has one form"
        return len(prompt.text) <= SHORT_PROMPT_BYTES
    return not prompt.chat.chat_template and prompt.chat.ByteSize() <= SHORT_PROMPT_BYTES
