"""Where and how an executor may be asked to run: the values of its flags.

Whoever starts one checks them with the same words. Read by `executor`, `client` and `bench`.
"""

from __future__ import annotations

from typing import Final

DEVICES: Final = ("auto", "cpu", "cuda")
DTYPES: Final = ("auto", "float32", "bfloat16", "float64")
"""Of the weights."""
ATTENTIONS: Final = ("auto", "flashinfer", "fa3", "varlen", "gather")
"""Kernels on a GPU; what each is, says `attention_backends` in the executor."""
