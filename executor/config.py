"""The executor's command line: flags in, one frozen config out, everything checked once.

Owns defaults and their limits. Knows nothing of models and devices beyond the flags' values.
Called by `__main__`; `UserError` and the log format also by `prepare`.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from gapless.protos.executor_flags import ATTENTIONS, DEVICES, DTYPES
from gapless.protos.model_folder import missing_files
from gapless.protos.rendezvous import executors_endpoint

LOG_FORMAT: Final = "%(asctime)s {process} %(levelname)s %(message)s"
PRESET_PREFIX: Final = "preset:"


class UserError(Exception):
    """Whoever started the process must change something; the message, one line, says what."""


CPU_TOKEN_MAX: Final = 512
GPU_TOKEN_MAX: Final = 2048


@dataclasses.dataclass(frozen=True, slots=True)
class Config:
    """One executor process. Sizes are in tokens, blocks and rows."""

    run_folder: Path
    model: Path
    preset: str | None
    """An architecture with random weights instead of `model`."""
    device: str
    """``auto``: the GPU if there is one."""
    attention: str
    dtype: str
    """``auto``: float32 on a CPU, elsewhere the dtype in which the weights stand."""
    kv_blocks: int | None
    """Blocks of the KV pool, the scratch block included; None: what memory allows."""
    block_tokens: int
    row_max: int
    token_max: int | None
    """None: what `default_token_max` says."""
    context_length_max: int | None
    """Upper limit to the model's own context length."""
    threads: int
    ready_fd: int | None


def parse(arguments: Sequence[str] | None) -> Config:
    """Reads the flags; argparse prints usage and exits with status 2 on malformed ones.

    Raises:
        UserError: well-formed flags that cannot be served.
    """
    options = _parser().parse_args(arguments)
    preset = None
    if options.model.startswith(PRESET_PREFIX):
        preset = options.model.removeprefix(PRESET_PREFIX)
    model = Path(options.model).absolute()
    if preset is None:
        _check_folder(model)
    if not options.run_folder.is_dir():
        raise UserError(f"no such run folder: {options.run_folder}")
    try:
        executors_endpoint(options.run_folder)
        if options.ready_fd is not None:
            os.fstat(options.ready_fd)
    except (ValueError, OSError) as error:
        raise UserError(str(error)) from error
    if options.token_max is not None and options.token_max < options.row_max:
        raise UserError(
            f"--token-max {options.token_max} is less than --row-max {options.row_max}: "
            "each row has at least one token"
        )
    return Config(
        run_folder=options.run_folder,
        model=model,
        preset=preset,
        device=options.device,
        attention=options.attention,
        dtype=options.dtype,
        kv_blocks=options.kv_blocks,
        block_tokens=options.block_tokens,
        row_max=options.row_max,
        token_max=options.token_max,
        context_length_max=options.context_length_max,
        threads=options.threads or default_threads(),
        ready_fd=options.ready_fd,
    )


def _check_folder(model: Path) -> None:
    if not model.is_dir():
        raise UserError(f"no such model folder: {model}")
    missing = missing_files(model)
    if missing:
        raise UserError(
            f"{model} is no model folder (missing: {', '.join(missing)}); "
            "python -m gapless.executor.prepare makes one"
        )


def default_token_max(device: str, row_max: int) -> int:
    """Tokens of a step where the user says nothing: what others wait for when prompts are read.

    On an H200 an 8B model reads 2,048 tokens in 50 ms, at 24 microseconds a token; in larger steps
    a token takes as long (benchmarks/), and others wait longer. `device` is of torch's kinds.
    """
    return max(CPU_TOKEN_MAX if device == "cpu" else GPU_TOKEN_MAX, row_max)


def default_threads() -> int:
    """``$OMP_NUM_THREADS`` if that is a number, else the cores of this process less one.

    The one is left to the I/O thread and to the scheduler, whose work is short and urgent. Of two
    cores it would be half the machine: there all are used.
    """
    asked = os.environ.get("OMP_NUM_THREADS", "")
    if asked.isdecimal() and int(asked) > 0:
        return int(asked)
    cores = len(os.sched_getaffinity(0))
    return cores if cores <= 2 else cores - 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "gapless.executor", description="Runs the steps of one model for a Gapless scheduler."
    )
    add = parser.add_argument
    add("--run-folder", type=Path, required=True, help="folder shared with the scheduler")
    add("--model", required=True, metavar="FOLDER", help="or preset:NAME, with random weights")
    add("--device", choices=DEVICES, default="auto", help="default: the GPU if there is one")
    add("--attention", choices=ATTENTIONS, default="auto", help="on a GPU; default: the best there")
    add("--dtype", choices=DTYPES, default="auto", help="default: float32 on a CPU")
    add("--kv-blocks", type=_at_least(2), metavar="N", help="default: what memory allows")
    add("--block-tokens", type=_at_least(1), default=16, metavar="N", help="default: 16")
    add("--row-max", type=_at_least(1), default=64, metavar="N", help="rows a step (64)")
    add("--token-max", type=_at_least(1), metavar="N", help="tokens a step (512; GPU: 2048)")
    add("--context-length-max", type=_at_least(2), metavar="N", help="default: the model's")
    add("--threads", type=_at_least(1), metavar="N", help="default: cores less one, of two both")
    add("--ready-fd", type=int, metavar="N", help="gets the line 'ready' once attached")
    return parser


def _at_least(minimum: int) -> Callable[[str], int]:
    def count(text: str) -> int:
        value = int(text)
        if value < minimum:
            raise argparse.ArgumentTypeError(f"must be at least {minimum}, not {value}")
        return value

    return count
