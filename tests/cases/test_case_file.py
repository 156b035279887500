"""The form of the case file: variables, ranges, dotted keys, defaults, long lists."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cases.case_file import CaseFile, Send, load, with_context

TEXT = """
defaults: {sampling: {temperature: 0}, output: {token_ids: true}}
nums: {prompt_ids: [1], ids: [2]}
cases:
- id: A
  kind: k
  title: t
  source: []
  request:
  - name: 'x{i}'
    rpc: Generate
    body: {prompt.text: 'Hi {i}', sampling: $s, stopping.max_new_tokens: $i}
    foreach: {i: {$range: [3, 4]}, s: [{temperature: 1.0}, {seed: 5}]}
    deadline_ms: $i
  - {name: none, rpc: Generate, body: {}}
  refused: [none]
  assert: []
"""


@pytest.fixture
def small_file(tmp_path: Path) -> CaseFile:
    path = tmp_path / "cases.yaml"
    path.write_text(TEXT)
    return load(path)


def test_a_send_is_filled_in_for_each_row(small_file: CaseFile) -> None:
    output = {"token_ids": True}
    first, second, none = small_file.cases[0].sends
    assert first == Send(
        name="x3",
        rpc="Generate",
        body={
            "prompt": {"text": "Hi 3"},
            "sampling": {"temperature": 1.0},
            "stopping": {"max_new_tokens": 3},
            "output": output,
        },
        deadline_ms=3,
    )
    assert second.name == "x4"
    assert second.body["sampling"] == {"temperature": 0, "seed": 5}
    assert none.body == {}


def test_long_lists_end_at_the_context() -> None:
    value = {"ids": {"$repeat": {"of": [7, 8, 9], "to_length": {"$ctx": -3}}}}
    assert with_context(value, 8) == {"ids": [7, 8, 9, 7, 8]}


def test_a_case_refuses_only_what_it_sends(tmp_path: Path) -> None:
    path = tmp_path / "cases.yaml"
    path.write_text(TEXT.replace("[none]", "[other]"))
    with pytest.raises(AssertionError, match="other"):
        load(path)


def test_recorded_cases_have_distinct_ids_and_their_sends_distinct_names() -> None:
    cases = load().cases
    assert len({case.id for case in cases}) == len(cases)
    for case in cases:
        assert len({send.name for send in case.sends}) == len(case.sends), case.id
