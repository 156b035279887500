"""The rules that a request must keep, in one pass and before anything is queued.

Owns the table of rules of the public API; `prompts` and `parameters` hold its larger sections, in
this order: request id and model, prompt, sampling, stopping, output, scheduling, resume, labels.
What is left when the length of the prompt is known stands in `admission`. Out comes a frozen
`ValidGenerate`; behind this edge nobody checks a field again.

Must not know: tokenizing, the scheduler, gRPC's calls. Called by `generate` and the
servicer.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Final

from gapless.gateway.failures import Failure, Resource
from gapless.gateway.findings import Findings
from gapless.gateway.model import DefaultSampling
from gapless.gateway.parameters import StoppingRequest, check_sampling, check_stopping
from gapless.gateway.prompts import PromptRequest, PromptRules, check_prompt, check_token_ids
from gapless.protos import inference_pb2
from gapless.protos.reasons import Reason
from gapless.protos.sampling import Sampling

LOGPROBS_MAX: Final = 20
FLUSH_INTERVAL_MAX_MS: Final = 1000
PROGRESS_INTERVAL_MIN_MS: Final = 100
PROGRESS_INTERVAL_MAX_MS: Final = 60_000
PRIORITY_MAX: Final = 100
QUEUE_TIMEOUT_MAX_S: Final = 3600.0
SCHEDULING_TEXT_BYTES_MAX: Final = 128
DETACHED_TTL_MAX_S: Final = 24 * 3600.0
RESUME_KEY_BYTES: Final = 16
LABELS_MAX: Final = 16
LABEL_VALUE_BYTES_MAX: Final = 128
CANCEL_IDS_MAX: Final = 1024
CANCEL_REASON_BYTES_MAX: Final = 256

_REQUEST_ID = re.compile(r"[A-Za-z0-9_.:-]{1,64}")
_LABEL_KEY = re.compile(r"[a-z][a-z0-9_]{0,31}")


@dataclasses.dataclass(frozen=True, slots=True)
class Rules:
    """What the rules depend on: the model served and this deployment's choices."""

    model_name: str
    prompt: PromptRules
    default_sampling: DefaultSampling
    flush_interval_ms: int


@dataclasses.dataclass(frozen=True, slots=True)
class OutputRequest:
    """What comes back, and how often."""

    text: bool
    token_ids: bool
    prompt_token_ids: bool
    skip_special_tokens: bool
    flush_interval_s: float


@dataclasses.dataclass(frozen=True, slots=True)
class SchedulingRequest:
    """How a request is queued and cached."""

    priority: int
    queue_timeout_s: float | None
    session_id: str
    cache_salt: str
    """Empty: that of the tenant."""
    bypass_prefix_cache: bool


@dataclasses.dataclass(frozen=True, slots=True)
class ValidGenerate:
    """A GenerateRequest that keeps every rule but those on the length of its prompt."""

    request_id: str
    """Empty if the server has to draw one."""
    prompt: PromptRequest
    sampling: Sampling
    stopping: StoppingRequest
    output: OutputRequest
    scheduling: SchedulingRequest
    labels: dict[str, str]


def validate_generate(
    request: inference_pb2.GenerateRequest, rules: Rules, seed: int
) -> ValidGenerate:
    """Raises Failure. `seed` is in force if the caller sent none."""
    findings = Findings()
    vocab_size = rules.prompt.vocab_size
    if request.request_id and not _REQUEST_ID.fullmatch(request.request_id):
        findings.invalid("request_id", "must match [A-Za-z0-9_.:-]{1,64}")
    _check_model(request.model, rules, findings)
    if request.adapter:
        findings.unsupported("adapter")
    prompt = check_prompt(request.prompt, rules.prompt, findings)
    sampling = check_sampling(request.sampling, rules.default_sampling, vocab_size, seed, findings)
    stopping = check_stopping(
        request.stopping,
        vocab_size,
        scores_prompt=request.output.HasField("prompt_logprobs"),
        findings=findings,
    )
    output = _check_output(request.output, rules, findings)
    scheduling = _check_scheduling(request.scheduling, findings)
    _check_resume(request, vocab_size, findings)
    _check_labels(request, findings)
    findings.raise_first()
    assert prompt is not None, "a prompt without a finding is valid"
    return ValidGenerate(
        request_id=request.request_id,
        prompt=prompt,
        sampling=sampling,
        stopping=stopping,
        output=output,
        scheduling=scheduling,
        labels=dict(request.labels),
    )


def validate_tokenize(request: inference_pb2.TokenizeRequest, rules: Rules) -> PromptRequest:
    """Raises Failure."""
    findings = Findings()
    _check_model(request.model, rules, findings)
    prompt = check_prompt(request.prompt, rules.prompt, findings)
    if request.return_offsets and request.prompt.WhichOneof("input") == "token_ids":
        findings.invalid("return_offsets", "must be unset with token_ids, which are no text")
    findings.raise_first()
    assert prompt is not None, "a prompt without a finding is valid"
    return prompt


def validate_detokenize(request: inference_pb2.DetokenizeRequest, rules: Rules) -> None:
    """Raises Failure."""
    findings = Findings()
    _check_model(request.model, rules, findings)
    count = len(request.token_ids)
    if findings.check_integer("token_ids", count, 1, rules.prompt.context_length):
        check_token_ids("token_ids", request.token_ids, rules.prompt.vocab_size, findings)
    findings.raise_first()


def validate_get_model(request: inference_pb2.GetModelRequest, rules: Rules) -> None:
    """Raises Failure."""
    findings = Findings()
    _check_model(request.model, rules, findings)
    findings.raise_first()


def validate_cancel(request: inference_pb2.CancelGenerateRequest) -> None:
    """Raises Failure. Unknown ids are no error, ids that no request can have are."""
    findings = Findings()
    count = len(request.request_ids)
    if findings.check_integer("request_ids", count, 1, CANCEL_IDS_MAX):
        for index, request_id in enumerate(request.request_ids):
            if not _REQUEST_ID.fullmatch(request_id):
                findings.invalid(f"request_ids[{index}]", "must match [A-Za-z0-9_.:-]{1,64}")
    findings.check_size("reason", request.reason, CANCEL_REASON_BYTES_MAX)
    findings.raise_first()


def _check_model(model: str, rules: Rules, findings: Findings) -> None:
    """Rule 4. Another model's vocabulary is not ours, so an unknown name ends the pass."""
    if model and model != rules.model_name:
        findings.refuse(
            Failure(
                Reason.MODEL_NOT_FOUND,
                f"this server has no model {model[:64]!r}",
                resource=Resource("model", model),
            )
        )
        findings.raise_first()


def _check_output(
    options: inference_pb2.OutputOptions, rules: Rules, findings: Findings
) -> OutputRequest:
    """Rules 27 to 29."""
    for name in ("logprobs", "prompt_logprobs"):
        if options.HasField(name) and findings.check_integer(
            f"output.{name}", getattr(options, name), 0, LOGPROBS_MAX
        ):
            findings.unsupported(f"output.{name}")
    flush_interval_ms = rules.flush_interval_ms
    if options.HasField("flush_interval_ms"):
        flush_interval_ms = options.flush_interval_ms
        findings.check_integer(
            "output.flush_interval_ms", flush_interval_ms, 0, FLUSH_INTERVAL_MAX_MS
        )
    if options.progress_interval_ms and findings.check_integer(
        "output.progress_interval_ms",
        options.progress_interval_ms,
        PROGRESS_INTERVAL_MIN_MS,
        PROGRESS_INTERVAL_MAX_MS,
    ):
        findings.unsupported("output.progress_interval_ms")
    text = options.text if options.HasField("text") else True
    wants_logprobs = options.HasField("logprobs") or options.HasField("prompt_logprobs")
    if not (text or options.token_ids or wants_logprobs):
        findings.invalid("output", "asks for nothing: no text, token ids or log-probabilities")
    return OutputRequest(
        text=text,
        token_ids=options.token_ids,
        prompt_token_ids=options.prompt_token_ids,
        skip_special_tokens=(
            options.skip_special_tokens if options.HasField("skip_special_tokens") else True
        ),
        flush_interval_s=flush_interval_ms / 1000,
    )


def _check_scheduling(
    params: inference_pb2.SchedulingParams, findings: Findings
) -> SchedulingRequest:
    """Rules 26 (queue timeout), 30 and 31."""
    queue_timeout_s = None
    if params.HasField("queue_timeout"):
        queue_timeout_s = findings.duration_s(
            "scheduling.queue_timeout", params.queue_timeout, QUEUE_TIMEOUT_MAX_S
        )
    valid = findings.check_integer(
        "scheduling.priority", params.priority, -PRIORITY_MAX, PRIORITY_MAX
    )
    if valid and params.priority > 0:
        findings.refuse(
            Failure(
                Reason.PERMISSION_DENIED,
                "a scheduling.priority above 0 needs a privilege",
                metadata={"field": "scheduling.priority"},
            )
        )
    for name in ("session_id", "cache_salt"):
        findings.check_size(f"scheduling.{name}", getattr(params, name), SCHEDULING_TEXT_BYTES_MAX)
    return SchedulingRequest(
        priority=params.priority,
        queue_timeout_s=queue_timeout_s,
        session_id=params.session_id,
        cache_salt=params.cache_salt,
        bypass_prefix_cache=params.bypass_prefix_cache,
    )


def _check_resume(
    request: inference_pb2.GenerateRequest, vocab_size: int, findings: Findings
) -> None:
    """Rule 32. Well-formed, but nothing of it is offered yet."""
    resume = request.resume
    if resume.key and len(resume.key) != RESUME_KEY_BYTES:
        findings.invalid(
            "resume.key", f"has {len(resume.key)} bytes, must have 0 or {RESUME_KEY_BYTES}"
        )
    if resume.HasField("detached_ttl"):
        findings.duration_s("resume.detached_ttl", resume.detached_ttl, DETACHED_TTL_MAX_S)
    for index, prior in enumerate(request.prior):
        check_token_ids(f"prior[{index}].token_ids", prior.token_ids, vocab_size, findings)
    if resume.ByteSize():
        findings.unsupported("resume")
    if request.prior:
        findings.unsupported("prior")


def _check_labels(request: inference_pb2.GenerateRequest, findings: Findings) -> None:
    """Rule 33."""
    if len(request.labels) > LABELS_MAX:
        findings.invalid("labels", f"has {len(request.labels)} entries, at most {LABELS_MAX}")
        return
    for key, value in request.labels.items():
        if not _LABEL_KEY.fullmatch(key):
            findings.invalid(f"labels[{key[:40]}]", "the key must match [a-z][a-z0-9_]{0,31}")
        else:
            findings.check_size(f"labels[{key}]", value, LABEL_VALUE_BYTES_MAX)
