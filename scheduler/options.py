"""The command line of the scheduler process, as one frozen value.

Owns the names, the defaults and the limits of its flags. Called by `__main__`; everything else
receives `Options`. What depends on the model is not here: the executor tells it in its greeting,
and `config.CoreConfig` is made of both.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
from collections.abc import Callable, Sequence
from pathlib import Path

from gapless.protos import rendezvous
from gapless.protos.messages import ModelFacts
from gapless.scheduler.config import CoreConfig


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What a user chose for one scheduler."""

    run_folder: Path
    depth: int = 2
    """Steps in flight: 2 overlaps, 1 is synchronous."""
    running_max: int = 64
    queued_max: int = 1024
    queued_tokens_max: int = 0
    """Most tokens that wait; 0 = no limit."""
    step_tokens_max: int | None = None
    """None: as many as the executor takes."""
    chunk_tokens_max: int | None = None
    """None: as many as a step takes."""
    drain_timeout_s: float = 60.0
    step_log: Path | None = None
    """Where the stamps of all steps are written at the end; see `protos.step_log`."""
    ready_fd: int | None = None
    """Where the line ``ready`` goes once the sockets are bound."""

    def core_config(self, facts: ModelFacts) -> CoreConfig:
        """The limits of a core for an executor with these facts."""
        return CoreConfig.from_facts(
            facts,
            running_max=self.running_max,
            queued_max=self.queued_max,
            queued_tokens_max=self.queued_tokens_max,
            depth=self.depth,
            step_tokens_max=self.step_tokens_max,
            chunk_tokens_max=self.chunk_tokens_max,
        )


def parse(arguments: Sequence[str]) -> Options:
    """Reads a command line.

    Raises:
        SystemExit: it is wrong (status 2, the reason on stderr) or asks for help (status 0).
    """
    parser = argparse.ArgumentParser(
        prog="python -m gapless.scheduler",
        description="The scheduler of a Gapless server: queues, KV blocks, batches and stops.",
        allow_abbrev=False,
    )
    defaults = {field.name: field.default for field in dataclasses.fields(Options)}
    add = parser.add_argument
    add("--run-folder", type=_run_folder, required=True, help="tmpfs folder of this server")
    add("--depth", type=int, choices=(1, 2), help="steps in flight; 1 is synchronous")
    add("--running-max", type=_count(1), help="most sequences that run at once")
    add("--queued-max", type=_count(1), help="most requests that wait")
    add("--queued-tokens-max", type=_count(0), help="most prompt tokens that wait; 0 = no limit")
    add("--step-tokens-max", type=_count(1), help="most input tokens of a step")
    add("--chunk-tokens-max", type=_count(1), help="most input tokens of one prompt in a step")
    add("--drain-timeout-s", type=_seconds, help="how long SIGTERM lets requests run")
    add("--step-log", type=Path, metavar="FILE", help="write every step's stamps there at the end")
    add("--ready-fd", type=_count(0), help="inherited descriptor for the line 'ready'")
    parser.set_defaults(**{name: defaults[name] for name in defaults if name != "run_folder"})
    options = Options(**vars(parser.parse_args(arguments)))
    step, chunk = options.step_tokens_max, options.chunk_tokens_max
    if step is not None and chunk is not None and chunk > step:
        parser.error(f"--chunk-tokens-max {chunk} is more than --step-tokens-max {step}")
    return options


def _count(least: int) -> Callable[[str], int]:
    def count(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
        if not least <= value < 2**31:
            raise argparse.ArgumentTypeError(f"{value} is not between {least} and 2147483647")
        return value

    return count


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds") from None
    if not (math.isfinite(value) and value >= 0):
        raise argparse.ArgumentTypeError(f"{text} is not a duration")
    return value


def _run_folder(text: str) -> Path:
    folder = Path(text)
    try:
        rendezvous.gateways_endpoint(folder)
        rendezvous.executors_endpoint(folder)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return folder.absolute()
