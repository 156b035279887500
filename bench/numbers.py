"""Numbers on a command line of ``gapless bench``, and what is wrong with one in words.

Owns their limits. Called by `options` and `load_options`; argparse names the flag.
"""

from __future__ import annotations

import argparse
import math
from typing import Final

INT31_MAX: Final = 2**31 - 1


def natural(text: str) -> int:
    """A whole number from 0 on, of 31 bits.

    Raises:
        argparse.ArgumentTypeError: `text` is none.
    """
    return _integer(text, 0)


def count(text: str) -> int:
    """A whole number from 1 on, of 31 bits.

    Raises:
        argparse.ArgumentTypeError: `text` is none.
    """
    return _integer(text, 1)


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


def _integer(text: str, least: int) -> int:
    try:
        value = int(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number") from error
    if not least <= value <= INT31_MAX:
        raise argparse.ArgumentTypeError(f"{value} is not between {least} and {INT31_MAX}")
    return value
