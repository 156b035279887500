"""The public service: one short method per rpc, the work done elsewhere.

Must not know: sockets, processes. Called by grpc.aio, behind `boundary.Boundary`.
"""

from __future__ import annotations

import json
import logging
from typing import Any, Final

from gapless.gateway import failures
from gapless.gateway.admission import TENANT
from gapless.gateway.config import Config
from gapless.gateway.failures import Violation
from gapless.gateway.generate import Generation, require_welcome
from gapless.gateway.link import Link
from gapless.gateway.model import ServedModel
from gapless.gateway.preparation import Preparation
from gapless.gateway.validation import (
    validate_cancel,
    validate_detokenize,
    validate_get_model,
    validate_tokenize,
)
from gapless.protos import inference_pb2, inference_pb2_grpc

RESPONSE_BYTES_MAX: Final = 1 << 20
"""No server message is larger, so that a client with stock limits always works."""

_LOG = logging.getLogger("gapless.gateway")


class InferenceServicer(inference_pb2_grpc.InferenceServiceServicer):
    """gapless.v1.InferenceService."""

    def __init__(
        self,
        config: Config,
        model: ServedModel,
        link: Link,
        generation: Generation,
        preparation: Preparation,
    ) -> None:
        self._config = config
        self._model = model
        self._link = link
        self._generation = generation
        self._preparation = preparation

    async def Generate(  # type: ignore[override]  # noqa: N802
        self, request: inference_pb2.GenerateRequest, context: Any
    ) -> None:
        """Streams a generation; writes to `context`."""
        await self._generation.run(request, context)

    async def CancelGenerate(  # noqa: N802
        self, request: inference_pb2.CancelGenerateRequest, context: Any
    ) -> inference_pb2.CancelGenerateResponse:
        """Ends requests by id, at whichever gateway their streams are."""
        validate_cancel(request)
        live = await self._link.cancel_by_id(TENANT, tuple(dict.fromkeys(request.request_ids)))
        _LOG.info("cancel %s", json.dumps({"request_ids": live, "reason": request.reason}))
        return inference_pb2.CancelGenerateResponse(cancelled_request_ids=live)

    async def Tokenize(  # noqa: N802
        self, request: inference_pb2.TokenizeRequest, context: Any
    ) -> inference_pb2.TokenizeResponse:
        """The tokens that Generate would see."""
        rules = self._generation.rules()
        prompt = await self._preparation.run(lambda: validate_tokenize(request, rules))
        prepared = await self._preparation.prepare(prompt, with_offsets=request.return_offsets)
        response = inference_pb2.TokenizeResponse(
            token_count=len(prepared.token_ids), rendered_text=prepared.text
        )
        if not request.HasField("return_token_ids") or request.return_token_ids:
            response.token_ids.extend(prepared.token_ids)
        if request.return_offsets:
            response.start_bytes.extend(prepared.start_bytes)
            response.end_bytes.extend(prepared.end_bytes)
        if response.ByteSize() > RESPONSE_BYTES_MAX:
            raise _too_large("prompt")
        return response

    async def Detokenize(  # noqa: N802
        self, request: inference_pb2.DetokenizeRequest, context: Any
    ) -> inference_pb2.DetokenizeResponse:
        """The text of token ids."""
        rules = self._generation.rules()
        skip = request.skip_special_tokens if request.HasField("skip_special_tokens") else True

        def detokenize() -> str:
            validate_detokenize(request, rules)
            return self._model.tokenizer.detokenize(request.token_ids, skip_special_tokens=skip)

        text = await self._preparation.run(detokenize)
        response = inference_pb2.DetokenizeResponse(text=text)
        if response.ByteSize() > RESPONSE_BYTES_MAX:
            raise _too_large("token_ids")
        return response

    async def GetModel(  # noqa: N802
        self, request: inference_pb2.GetModelRequest, context: Any
    ) -> inference_pb2.GetModelResponse:
        """The model served."""
        validate_get_model(request, self._generation.rules())
        return inference_pb2.GetModelResponse(model=self._description())

    async def ListModels(  # noqa: N802
        self, request: inference_pb2.ListModelsRequest, context: Any
    ) -> inference_pb2.ListModelsResponse:
        """The one model served."""
        return inference_pb2.ListModelsResponse(models=[self._description()])

    def _description(self) -> inference_pb2.Model:
        welcome = require_welcome(self._link)
        model, facts, limits = self._model, welcome.facts, welcome.limits
        sampling = model.default_sampling
        return inference_pb2.Model(
            name=model.name,
            architecture=model.architecture,
            revision=model.revision,
            context_length=facts.context_length,
            max_prompt_tokens=min(limits.prompt_tokens_max, facts.context_length - 1),
            max_prompt_bytes=self._config.prompt_bytes_max,
            vocab_size=facts.vocab_size,
            bos_token_id=model.tokenizer.bos_token,
            eos_token_ids=model.end_tokens,
            has_chat_template=model.template is not None,
            default_sampling=inference_pb2.SamplingParams(
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                top_k=sampling.top_k,
                min_p=sampling.min_p,
            ),
            default_max_new_tokens=self._config.default_max_new_tokens,
        )


def _too_large(field: str) -> failures.Failure:
    return failures.invalid(
        (Violation(field, f"the answer would be larger than {RESPONSE_BYTES_MAX} bytes"),)
    )
