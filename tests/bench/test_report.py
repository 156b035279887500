"""Comparing tokens, and the table."""

from __future__ import annotations

import dataclasses

import numpy as np

from gapless.bench import report
from tests.bench.test_trace import run_of


def test_a_difference_is_placed() -> None:
    tokens = [np.array([1, 2, 3], np.int32), np.array([4, 5], np.int32)]
    other = [np.array([1, 2, 3], np.int32), np.array([4, 6], np.int32)]
    first = dataclasses.replace(run_of(1, 2), tokens=tokens)
    assert report.difference(first, first) == (2, None)
    assert report.difference(first, dataclasses.replace(first, tokens=other)) == (1, 1)
    assert report.first_difference(tokens[1], other[1]) == 1
