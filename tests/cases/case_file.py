"""The recorded cases as values: reads ``cases.yaml`` and fills in variables, lists and defaults.

Owns the form of the file, which its head describes. Knows nothing of gRPC. Called by the runner
and by its test.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

CASES_PATH = Path(__file__).with_name("cases.yaml")

Json = Any
"""What YAML brings; checked where it becomes a protobuf message."""


@dataclass(frozen=True, slots=True)
class Send:
    """One call of a case; its variables are filled in."""

    name: str
    rpc: str
    body: Json = None
    raw_hex: str | None = None
    parallel: str | None = None
    start_when: str | None = None
    deadline_ms: int | None = None


@dataclass(frozen=True, slots=True)
class Case:
    id: str
    kind: str
    title: str
    source: list[str]
    sends: list[Send]
    values: dict[str, Json]
    assertions: list[str]
    refused: frozenset[str]
    """Names of the sends that need something not offered yet."""


@dataclass(frozen=True, slots=True)
class CaseFile:
    cases: list[Case]
    nums_prompt_ids: list[int]
    nums_ids: list[int]
    """The answer that the server must still give after each case."""


def load(path: Path = CASES_PATH) -> CaseFile:
    content = yaml.safe_load(path.read_text())
    cases = [_case(entry, content["defaults"]) for entry in content["cases"]]
    return CaseFile(cases, content["nums"]["prompt_ids"], content["nums"]["ids"])


def _case(entry: Json, defaults: Json) -> Case:
    sends = [send for form in entry["request"] for send in _sends(form, defaults)]
    refused = frozenset(entry.get("refused", ()))
    unknown = refused - {send.name for send in sends}
    assert not unknown, f"{entry['id']} calls refused what it never sends: {unknown}"
    return Case(
        id=entry["id"],
        kind=entry["kind"],
        title=entry["title"],
        source=entry["source"],
        sends=sends,
        values=entry.get("values", {}),
        assertions=entry["assert"],
        refused=refused,
    )


def _sends(form: Json, defaults: Json) -> list[Send]:
    """One send, or one for each row of ``foreach``."""
    variables = {
        name: list(range(values["$range"][0], values["$range"][1] + 1))
        if isinstance(values, dict)
        else values
        for name, values in form.get("foreach", {}).items()
    }
    template = {name: value for name, value in form.items() if name != "foreach"}
    rows = zip(*variables.values(), strict=True) if variables else [()]
    sends = []
    for row in rows:
        filled = _filled(template, dict(zip(variables, row, strict=True)))
        body = _nested(filled.get("body"))
        if filled["rpc"] == "Generate" and body:
            body = _merged(defaults, body)
        sends.append(Send(**(filled | {"body": body})))
    return sends


def _filled(value: Json, variables: dict[str, Json]) -> Json:
    """`value` with ``$name`` replaced by the variable, and ``{name}`` inside strings."""
    match value:
        case dict():
            return {name: _filled(part, variables) for name, part in value.items()}
        case list():
            return [_filled(part, variables) for part in value]
        case str() if value.startswith("$"):
            return variables[value[1:]]
        case str():
            for name, part in variables.items():
                value = value.replace(f"{{{name}}}", str(part))
    return value


def _nested(value: Json) -> Json:
    """`value` with dotted keys as mappings in mappings."""
    match value:
        case dict():
            whole: dict[str, Json] = {}
            for name, part in value.items():
                inner = _nested(part)
                for piece in reversed(name.split(".")):
                    inner = {piece: inner}
                whole = _merged(whole, inner)
            return whole
        case list():
            return [_nested(part) for part in value]
    return value


def _merged(lower: Json, upper: Json) -> Json:
    """Both mappings in one; where they meet, `upper` holds."""
    if not isinstance(lower, dict) or not isinstance(upper, dict):
        return upper
    whole = dict(lower)
    for name, part in upper.items():
        whole[name] = _merged(lower[name], part) if name in lower else part
    return whole


def with_context(value: Json, context_length: int) -> Json:
    """`value` with ``$ctx`` and ``$repeat`` worked out."""
    match value:
        case {"$ctx": int(offset)}:
            return context_length + offset
        case {"$repeat": {"of": list(items), "to_length": length}}:
            count = with_context(length, context_length)
            return list(itertools.islice(itertools.cycle(items), count))
        case dict():
            return {name: with_context(part, context_length) for name, part in value.items()}
        case list():
            return [with_context(part, context_length) for part in value]
    return value
