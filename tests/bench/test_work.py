"""Which requests a benchmark makes."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

from gapless.bench import work
from gapless.bench.work import WorkError


def test_a_batch_is_the_same_each_time() -> None:
    first, second = work.batch(3, 5, 7, 1000), work.batch(3, 5, 7, 1000)
    assert [len(each.prompt) for each in first.requests] == [5, 5, 5]
    assert first.new_tokens == 21
    assert first.prompt_tokens == 15
    assert first.length_max == 12
    for a, b in zip(first.requests, second.requests, strict=True):
        assert np.array_equal(a.prompt, b.prompt)


def test_mixed_work_draws_lengths_and_ids_in_one_order() -> None:
    draw = random.Random(0)
    drawn = work.mixed(20, 128_256)
    for request in drawn.requests:
        prompt_tokens, new_tokens = draw.randint(128, 896), draw.randint(64, 448)
        assert request.prompt.tolist() == [
            draw.randrange(10, 128_000) for _ in range(prompt_tokens)
        ]
        assert request.new_tokens == new_tokens
    assert work.mixed(1000, 1024).running_max == 256
    assert all((each.prompt < 1024).all() for each in work.mixed(20, 1024).requests)


def test_a_file_names_lengths_or_ids(tmp_path: Path) -> None:
    path = tmp_path / "some.jsonl"
    path.write_text('{"prompt": 4, "new": 2}\n\n{"prompt": [1, 2, 3], "new": 5}\n')
    found = work.from_file(path, 10)
    assert [len(each.prompt) for each in found.requests] == [4, 3]
    assert found.requests[1].prompt.tolist() == [1, 2, 3]
    assert [each.new_tokens for each in found.requests] == [2, 5]
    assert found.fields == {"name": "some", "requests": 2, "running": 2}


@pytest.mark.parametrize(
    "line",
    [
        "[]",
        "{",
        '{"prompt": 4}',
        '{"prompt": 0, "new": 2}',
        '{"prompt": [10], "new": 2}',
        '{"prompt": [], "new": 2}',
        '{"prompt": "text", "new": 2}',
        '{"prompt": 4, "new": 0}',
        '{"prompt": 4, "new": "2"}',
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "some.jsonl"
    path.write_text('{"prompt": 4, "new": 2}\n' + line + "\n")
    with pytest.raises(WorkError, match="line 2"):
        work.from_file(path, 10)


def test_an_empty_file_is_no_work(tmp_path: Path) -> None:
    path = tmp_path / "some.jsonl"
    path.write_text("\n")
    with pytest.raises(WorkError, match="no request"):
        work.from_file(path, 10)


def test_the_warm_up_meets_every_row_count_in_both_slots() -> None:
    warm_up = work.batch(4, 5, 100, 1000).warm_up(1000)
    # All start in one step; then a row has as many steps as new tokens.
    rows = [sum(each.new_tokens > step for each in warm_up.requests) for step in range(8)]
    assert rows == [4, 4, 3, 3, 2, 2, 1, 1]
