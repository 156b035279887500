"""Bodies of Generate requests that the rules refuse, or just still accept, as tables."""

from __future__ import annotations

from typing import Any

from google.protobuf import json_format

from gapless.protos import inference_pb2
from tests.gateway.harness import MODEL_NAME
from tests.models import VOCAB_SIZE

NAN, INF = "NaN", "Infinity"
TEXT: dict[str, Any] = {"text": "hello"}
USER: dict[str, Any] = {"role": "user", "content": "hi"}


def chat(**fields: Any) -> dict[str, Any]:
    return {"prompt": {"chat": {"messages": [USER], **fields}}}


def messages(*items: dict[str, Any]) -> dict[str, Any]:
    return chat(messages=list(items))


def tool_calls(*items: dict[str, Any]) -> dict[str, Any]:
    return messages({"role": "assistant", "tool_calls": list(items)})


def sampling(**fields: Any) -> dict[str, Any]:
    return {"sampling": fields}


def stopping(**fields: Any) -> dict[str, Any]:
    return {"stopping": fields}


def output(**fields: Any) -> dict[str, Any]:
    return {"output": fields}


def scheduling(**fields: Any) -> dict[str, Any]:
    return {"scheduling": fields}


V = VOCAB_SIZE
CALL = {"id": "c1", "name": "f", "arguments_json": "{}"}

INVALID: list[tuple[dict[str, Any], list[str]]] = [
    # 3: request_id
    ({"request_id": "é"}, ["request_id"]),
    ({"request_id": "a\nb"}, ["request_id"]),
    ({"request_id": "a\n"}, ["request_id"]),
    ({"request_id": "i" * 65}, ["request_id"]),
    # 6, 7, 8: forms of the prompt
    ({"prompt": {}}, ["prompt.input"]),
    ({"prompt": {"text": ""}}, ["prompt.text"]),
    ({"prompt": {"text": "x" * 2001}}, ["prompt.text"]),
    ({"prompt": {"text": "é" * 1001}}, ["prompt.text"]),
    ({"prompt": {"token_ids": {}}}, ["prompt.token_ids.ids"]),
    (
        {"prompt": {"token_ids": {"ids": [0, V, 1, 2**32 - 1]}}},
        ["prompt.token_ids.ids[1]", "prompt.token_ids.ids[3]"],
    ),
    # 9: messages
    (chat(messages=[]), ["prompt.chat.messages"]),
    (chat(messages=[USER] * 4097), ["prompt.chat.messages"]),
    (messages({"role": "", "content": "x"}), ["prompt.chat.messages[0].role"]),
    (messages({"role": "User", "content": "x"}), ["prompt.chat.messages[0].role"]),
    (messages({"role": "u" * 33, "content": "x"}), ["prompt.chat.messages[0].role"]),
    (messages(USER, {"role": "user"}), ["prompt.chat.messages[1].content"]),
    (messages({**USER, "name": "n" * 65}), ["prompt.chat.messages[0].name"]),
    (messages({**USER, "tool_call_id": "n" * 65}), ["prompt.chat.messages[0].tool_call_id"]),
    (tool_calls({**CALL, "id": ""}), ["prompt.chat.messages[0].tool_calls[0].id"]),
    (tool_calls(CALL, CALL), ["prompt.chat.messages[0].tool_calls[1].id"]),
    (tool_calls({**CALL, "name": "a b"}), ["prompt.chat.messages[0].tool_calls[0].name"]),
    *(
        (
            tool_calls({**CALL, "arguments_json": text}),
            ["prompt.chat.messages[0].tool_calls[0].arguments_json"],
        )
        for text in ("{", "[]", "5", '{"a": NaN}', "[" * 100_000)
    ),
    (
        tool_calls(*({**CALL, "id": f"c{index}"} for index in range(65))),
        ["prompt.chat.messages[0].tool_calls"],
    ),
    # 10: tools
    (chat(tools=[{"name": ""}]), ["prompt.chat.tools[0].name"]),
    (chat(tools=[{"name": "f"}, {"name": "f"}]), ["prompt.chat.tools[1].name"]),
    (chat(tools=[{"name": f"f{i}"} for i in range(257)]), ["prompt.chat.tools"]),
    (
        chat(tools=[{"name": "f", "parameters_json": "nope"}]),
        ["prompt.chat.tools[0].parameters_json"],
    ),
    (
        chat(tools=[{"name": "f", "parameters_json": '{"a":"' + "x" * 65_536 + '"}'}]),
        ["prompt.chat.tools[0].parameters_json"],
    ),
    (
        chat(tools=[{"name": "f", "description": "x" * 4097}]),
        ["prompt.chat.tools[0].description"],
    ),
    # 11: continue_final_message
    (
        {
            "prompt": {
                "chat": {
                    "messages": [{"role": "assistant", "content": "x"}],
                    "continue_final_message": True,
                    "add_generation_prompt": True,
                }
            }
        },
        ["prompt.chat.continue_final_message"],
    ),
    (chat(continue_final_message=True), ["prompt.chat.continue_final_message"]),
    # 14, and truncation
    (
        {"prompt": {"token_ids": {"ids": [1]}, "add_special_tokens": False}},
        ["prompt.add_special_tokens"],
    ),
    ({"prompt": {**TEXT, "truncate_to_last_tokens": 0}}, ["prompt.truncate_to_last_tokens"]),
    ({"prompt": {**TEXT, "truncate_to_last_tokens": 513}}, ["prompt.truncate_to_last_tokens"]),
    # 15 to 17: floats
    *(
        (sampling(**{name: value}), [f"sampling.{name}"])
        for name, values in {
            "temperature": (NAN, INF, "-Infinity", -0.1, 2.1),
            "top_p": (NAN, INF, 0.0, -0.5, 1.1),
            "min_p": (NAN, INF, -0.1, 1.1),
            "presence_penalty": (NAN, INF, -2.1, 2.1),
            "frequency_penalty": (NAN, "-Infinity", -2.1, 2.1),
            "repetition_penalty": (NAN, INF, 0.0, -1.0, 10.1),
        }.items()
        for value in values
    ),
    (sampling(top_k=V + 1), ["sampling.top_k"]),
    # 18: candidates
    (sampling(candidate_count=0), ["sampling.candidate_count"]),
    (sampling(candidate_count=17), ["sampling.candidate_count"]),
    (sampling(candidate_count=2, temperature=0), ["sampling.candidate_count"]),
    # 19, 20: lists of ids
    *(
        (sampling(logit_bias={5: value}), ["sampling.logit_bias[5]"])
        for value in (NAN, INF, "-Infinity", 100.5, -101)
    ),
    (sampling(logit_bias={V: 1.0}), [f"sampling.logit_bias[{V}]"]),
    (sampling(logit_bias=dict.fromkeys(range(1025), 1.0)), ["sampling.logit_bias"]),
    (sampling(allowed_token_ids=[V]), ["sampling.allowed_token_ids[0]"]),
    (sampling(banned_token_ids=[1, V]), ["sampling.banned_token_ids[1]"]),
    (sampling(allowed_token_ids=[1] * 4097), ["sampling.allowed_token_ids"]),
    (sampling(banned_token_ids=[1] * 4097), ["sampling.banned_token_ids"]),
    (
        sampling(allowed_token_ids=[1, 2], banned_token_ids=[2]),
        ["sampling.allowed_token_ids"],
    ),
    (sampling(banned_token_ids=list(range(V))), ["sampling.banned_token_ids"]),
    # 22: constraint
    (sampling(json_object=False), ["sampling.json_object"]),
    # 23, 24: lengths
    (stopping(max_new_tokens=0), ["stopping.max_new_tokens"]),
    (stopping(max_new_tokens=3, min_new_tokens=4), ["stopping.min_new_tokens"]),
    (stopping(min_new_tokens=65), ["stopping.min_new_tokens"]),
    # 25: stops
    (stopping(stop_strings=["x"] * 17), ["stopping.stop_strings"]),
    (stopping(stop_strings=["a", ""]), ["stopping.stop_strings[1]"]),
    (stopping(stop_strings=["é" * 129]), ["stopping.stop_strings[0]"]),
    (stopping(stop_token_ids=[1] * 65), ["stopping.stop_token_ids"]),
    (stopping(stop_token_ids=[1, V]), ["stopping.stop_token_ids[1]"]),
    # 26: durations (built as messages below where JSON cannot say them)
    (stopping(soft_time_limit="0s"), ["stopping.soft_time_limit"]),
    (stopping(soft_time_limit="-1s"), ["stopping.soft_time_limit"]),
    (stopping(soft_time_limit="86400.1s"), ["stopping.soft_time_limit"]),
    (scheduling(queue_timeout="0s"), ["scheduling.queue_timeout"]),
    (scheduling(queue_timeout="3601s"), ["scheduling.queue_timeout"]),
    # 27, 28, 29: output
    (output(logprobs=21), ["output.logprobs"]),
    (output(prompt_logprobs=21), ["output.prompt_logprobs"]),
    (output(flush_interval_ms=1001), ["output.flush_interval_ms"]),
    (output(progress_interval_ms=99), ["output.progress_interval_ms"]),
    (output(progress_interval_ms=60_001), ["output.progress_interval_ms"]),
    (output(text=False), ["output"]),
    # 30, 31: scheduling
    (scheduling(priority=101), ["scheduling.priority"]),
    (scheduling(priority=-101), ["scheduling.priority"]),
    (scheduling(session_id="x" * 129), ["scheduling.session_id"]),
    (scheduling(cache_salt="é" * 65), ["scheduling.cache_salt"]),
    # 32: resume and prior
    ({"resume": {"key": "AAAA"}}, ["resume.key"]),
    ({"resume": {"detached_ttl": "0s"}}, ["resume.detached_ttl"]),
    ({"prior": [{"token_ids": [1, V]}]}, ["prior[0].token_ids[1]"]),
    # 33: labels
    ({"labels": {f"k{index}": "" for index in range(17)}}, ["labels"]),
    ({"labels": {"Key": "v"}}, ["labels[Key]"]),
    ({"labels": {"key": "v" * 129}}, ["labels[key]"]),
    # several at once, in the order of the table
    (
        {
            "request_id": "é",
            "sampling": {"temperature": 3, "presence_penalty": NAN, "candidate_count": 4},
            "stopping": {"stop_strings": [""]},
            "output": {"text": False},
            "scheduling": {"priority": 5, "session_id": "x" * 200},
        },
        [
            "request_id",
            "sampling.temperature",
            "sampling.presence_penalty",
            "stopping.stop_strings[0]",
            "output",
            "scheduling.session_id",
        ],
    ),
]

UNSUPPORTED: list[tuple[dict[str, Any], str]] = [
    ({"adapter": "lora"}, "adapter"),
    (sampling(presence_penalty=0.5), "sampling.presence_penalty"),
    (sampling(frequency_penalty=-0.5), "sampling.frequency_penalty"),
    (sampling(repetition_penalty=1.5), "sampling.repetition_penalty"),
    (sampling(candidate_count=2), "sampling.candidate_count"),
    (sampling(json_schema="{}"), "sampling.json_schema"),
    (sampling(json_object=True), "sampling.json_object"),
    (sampling(regex="a"), "sampling.regex"),
    (sampling(ebnf_grammar="root ::= 'a'"), "sampling.ebnf_grammar"),
    (sampling(choices={"values": ["a"]}), "sampling.choices"),
    (output(logprobs=0), "output.logprobs"),
    (output(logprobs=20), "output.logprobs"),
    (output(prompt_logprobs=0), "output.prompt_logprobs"),
    (
        {"output": {"prompt_logprobs": 1}, "stopping": {"max_new_tokens": 0}},
        "output.prompt_logprobs",
    ),
    (output(progress_interval_ms=100), "output.progress_interval_ms"),
    ({"resume": {"key": "A" * 22}}, "resume"),
    ({"prior": [{"token_ids": [1]}]}, "prior"),
]

HONOURED: list[dict[str, Any]] = [
    {"request_id": "i" * 64, "model": MODEL_NAME, "labels": {"k": ""}},
    {"prompt": {"text": "x" * 200}},
    {"prompt": {"text": "a\0b", "add_special_tokens": False}},
    {"prompt": {"token_ids": {"ids": list(range(100)) * 6}, "truncate_to_last_tokens": 5}},
    chat(),
    messages({"role": "assistant", "content": "x"}, USER),
    sampling(temperature=0, top_p=1, top_k=V, min_p=1, seed=0, candidate_count=1),
    sampling(temperature=1.4e-45),
    sampling(presence_penalty=0, frequency_penalty=0, repetition_penalty=1),
    sampling(logit_bias={1: -100, 2: 100}, banned_token_ids=[2, 3], allowed_token_ids=[5, 5]),
    stopping(max_new_tokens=3, min_new_tokens=3, stop_strings=["é" * 128], stop_token_ids=[1]),
    stopping(ignore_eos=True, include_stop_in_text=True, soft_time_limit="86400s"),
    output(text=False, token_ids=True, skip_special_tokens=False, flush_interval_ms=1000),
    scheduling(
        priority=-100,
        queue_timeout="3600s",
        session_id="s",
        cache_salt="c",
        bypass_prefix_cache=True,
    ),
    {"resume": {}},
]


def build(body: dict[str, Any]) -> inference_pb2.GenerateRequest:
    whole = {"prompt": TEXT, **body}
    return json_format.ParseDict(whole, inference_pb2.GenerateRequest())
