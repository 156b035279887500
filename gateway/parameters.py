"""Validation of sampling and stopping parameters: rules 15 to 26 of the table in `validation`.

From public messages to `Sampling` and `StoppingRequest`, with the model's defaults filled in.
Must not know: prompts, the scheduler's limits.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from typing import Final, Literal

from gapless.gateway.findings import Findings
from gapless.gateway.model import DefaultSampling
from gapless.gateway.prompts import check_token_ids
from gapless.protos import inference_pb2
from gapless.protos.sampling import ALLOWED_TOKENS_MAX, Sampling

CANDIDATES_MAX: Final = 16
LOGIT_BIAS_MAX: Final = 1024
BANNED_TOKENS_MAX: Final = 4096
STOP_STRINGS_MAX: Final = 16
STOP_STRING_BYTES_MAX: Final = 256
STOP_TOKENS_MAX: Final = 64
SOFT_TIME_LIMIT_MAX_S: Final = 24 * 3600.0

_PENALTIES: Final[
    tuple[
        tuple[
            Literal["presence_penalty", "frequency_penalty", "repetition_penalty"],
            float,
            float,
            bool,
            float,
        ],
        ...,
    ]
] = (
    # name, low, high, low is open, neutral value
    ("presence_penalty", -2.0, 2.0, False, 0.0),
    ("frequency_penalty", -2.0, 2.0, False, 0.0),
    ("repetition_penalty", 0.0, 10.0, True, 1.0),
)


@dataclasses.dataclass(frozen=True, slots=True)
class StoppingRequest:
    """Valid stopping parameters, before the length of the prompt is known."""

    max_new_tokens: int | None
    min_new_tokens: int
    stop_strings: tuple[bytes, ...]
    stop_tokens: tuple[int, ...]
    """The caller's."""
    include_stop_in_text: bool
    ignore_eos: bool
    time_limit_s: float | None


def check_sampling(
    params: inference_pb2.SamplingParams,
    defaults: DefaultSampling,
    vocab_size: int,
    seed: int,
    findings: Findings,
) -> Sampling:
    """The parameters in force. `seed` is used if the caller sent none.

    Means nothing if `findings` came to something.
    """
    temperature = params.temperature if params.HasField("temperature") else defaults.temperature
    top_p = params.top_p if params.HasField("top_p") else defaults.top_p
    top_k = params.top_k if params.HasField("top_k") else defaults.top_k
    min_p = params.min_p if params.HasField("min_p") else defaults.min_p
    findings.check_float("sampling.temperature", temperature, 0.0, 2.0)
    findings.check_float("sampling.top_p", top_p, 0.0, 1.0, open_low=True)
    findings.check_float("sampling.min_p", min_p, 0.0, 1.0)
    findings.check_integer("sampling.top_k", top_k, 0, vocab_size)
    for name, low, high, open_low, neutral in _PENALTIES:
        if params.HasField(name):
            value = getattr(params, name)
            field = f"sampling.{name}"
            valid = findings.check_float(field, value, low, high, open_low=open_low)
            if valid and value != neutral:
                findings.unsupported(field)
    _check_candidate_count(params, temperature, findings)
    bias = _check_bias(params, vocab_size, findings)
    allowed = _check_allowed(params, vocab_size, findings)
    _check_constraint(params, findings)
    return Sampling(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        seed=params.seed if params.HasField("seed") else seed,
        bias_tokens=tuple(bias),
        bias_values=tuple(bias.values()),
        allowed_tokens=allowed,
    )


def _check_candidate_count(
    params: inference_pb2.SamplingParams, temperature: float, findings: Findings
) -> None:
    if not params.HasField("candidate_count"):
        return
    field, count = "sampling.candidate_count", params.candidate_count
    if not findings.check_integer(field, count, 1, CANDIDATES_MAX):
        return
    if count > 1 and temperature == 0:
        findings.invalid(field, "must be 1 when temperature is 0")
    elif count > 1:
        findings.unsupported(field)


def _check_bias(
    params: inference_pb2.SamplingParams, vocab_size: int, findings: Findings
) -> dict[int, float]:
    """What is added to the logits, bans (minus infinity) included."""
    field = "sampling.logit_bias"
    if len(params.logit_bias) > LOGIT_BIAS_MAX:
        findings.invalid(field, f"has {len(params.logit_bias)} entries, at most {LOGIT_BIAS_MAX}")
        return {}
    bias: dict[int, float] = {}
    for token, value in sorted(params.logit_bias.items()):
        if token >= vocab_size:
            findings.invalid(f"{field}[{token}]", f"the id must be below {vocab_size}")
        elif findings.check_float(f"{field}[{token}]", value, -100.0, 100.0):
            bias[token] = value
    banned = params.banned_token_ids
    if len(banned) > BANNED_TOKENS_MAX:
        findings.invalid(
            "sampling.banned_token_ids", f"has {len(banned)} items, at most {BANNED_TOKENS_MAX}"
        )
        return {}
    check_token_ids("sampling.banned_token_ids", banned, vocab_size, findings)
    if not params.allowed_token_ids and len(set(banned)) >= vocab_size:
        findings.invalid("sampling.banned_token_ids", "leaves no id that can be sampled")
    for token in banned:
        bias[token] = -math.inf
    return bias


def _check_allowed(
    params: inference_pb2.SamplingParams, vocab_size: int, findings: Findings
) -> tuple[int, ...]:
    field, allowed = "sampling.allowed_token_ids", params.allowed_token_ids
    if len(allowed) > ALLOWED_TOKENS_MAX:
        findings.invalid(field, f"has {len(allowed)} items, at most {ALLOWED_TOKENS_MAX}")
        return ()
    check_token_ids(field, allowed, vocab_size, findings)
    both = sorted(set(allowed).intersection(params.banned_token_ids[:BANNED_TOKENS_MAX]))
    if both:
        findings.invalid(field, f"{both[0]} is in banned_token_ids as well")
    return unique(allowed)


def _check_constraint(params: inference_pb2.SamplingParams, findings: Findings) -> None:
    form = params.WhichOneof("constraint")
    if form is None:
        return
    if form == "json_object" and not params.json_object:
        findings.invalid("sampling.json_object", "only true is valid")
    else:
        findings.unsupported(f"sampling.{form}")


def check_stopping(
    params: inference_pb2.StoppingParams,
    vocab_size: int,
    *,
    scores_prompt: bool,
    findings: Findings,
) -> StoppingRequest:
    """Rules 23 to 26. `scores_prompt`: prompt log-probabilities are asked for."""
    max_new_tokens = params.max_new_tokens if params.HasField("max_new_tokens") else None
    if max_new_tokens == 0 and not scores_prompt:
        findings.invalid("stopping.max_new_tokens", "may be 0 only with prompt_logprobs")
    elif max_new_tokens is not None and params.min_new_tokens > max_new_tokens:
        findings.invalid(
            "stopping.min_new_tokens",
            f"is {params.min_new_tokens}, must be at most max_new_tokens ({max_new_tokens})",
        )
    if len(params.stop_strings) > STOP_STRINGS_MAX:
        findings.invalid(
            "stopping.stop_strings",
            f"has {len(params.stop_strings)} items, at most {STOP_STRINGS_MAX}",
        )
    for index, text in enumerate(params.stop_strings[:STOP_STRINGS_MAX]):
        findings.check_size(f"stopping.stop_strings[{index}]", text, STOP_STRING_BYTES_MAX, 1)
    if len(params.stop_token_ids) > STOP_TOKENS_MAX:
        findings.invalid(
            "stopping.stop_token_ids",
            f"has {len(params.stop_token_ids)} items, at most {STOP_TOKENS_MAX}",
        )
    check_token_ids(
        "stopping.stop_token_ids", params.stop_token_ids[:STOP_TOKENS_MAX], vocab_size, findings
    )
    time_limit_s = None
    if params.HasField("soft_time_limit"):
        time_limit_s = findings.duration_s(
            "stopping.soft_time_limit", params.soft_time_limit, SOFT_TIME_LIMIT_MAX_S
        )
    return StoppingRequest(
        max_new_tokens=max_new_tokens,
        min_new_tokens=params.min_new_tokens,
        stop_strings=tuple(text.encode() for text in params.stop_strings),
        stop_tokens=unique(params.stop_token_ids),
        include_stop_in_text=params.include_stop_in_text,
        ignore_eos=params.ignore_eos,
        time_limit_s=time_limit_s,
    )


def unique(tokens: Iterable[int]) -> tuple[int, ...]:
    """Without repeats, in order of first appearance."""
    return tuple(dict.fromkeys(tokens))
