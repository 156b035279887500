"""Numbers on a command line of ``gapless bench``, and what is wrong with one in words.

Owns their limits. Called by `options` and `load_options`; argparse names the flag.
"""

from __future__ import annotations

import argparse
import math


def natural(text: str) -> int:
    """A whole number from 0 on, of 31 bits.

    Raises:
        argparse.ArgumentTypeError: `text` is none.
    """
    value = _integer(text)
    if not 0 <= value < 2**31:
        raise argparse.ArgumentTypeError(f"{value} is not between 0 and {2**31 - 1}")
    return value


def count(text: str) -> int:
    """A whole number from 1 on, of 31 bits.

    Raises:
        argparse.ArgumentTypeError: `text` is none.
    """
    value = _integer(text)
    if not 1 <= value < 2**31:
        raise argparse.ArgumentTypeError(f"{value} is not between 1 and {2**31 - 1}")
    return value


def positive(text: str) -> float:
    """A finite number above 0.

    Raises:
        argparse.ArgumentTypeError: `text` is none.
    """
    try:
        value = float(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no number") from error
    if not (math.isfinite(value) and value > 0):
        raise argparse.ArgumentTypeError(f"{text} is not more than 0")
    return value


def _integer(text: str) -> int:
    try:
        return int(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number") from error
