"""Do the stamps tell the truth? ``python -m benchmarks.check_stamps [--json FILE]``, on a GPU.

A step counts as active from its first stamp to its last: whatever gap there is between two of its
kernels is hidden. Here torch's profiler says how long kernels really ran: the union of their
intervals over some hundred steps, of decode alone and of a mixed load, beside the spans of the
stamps. What is missing is, in a graph, the launch of one node behind the other and, in a step
outside graphs, the host's launches as well. The profiler itself slows steps down; how much is said
by the same spans without it.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from benchmarks.kernel_record import RecordedStep, load, machine, make_ready, record, run_steps
from gapless.executor.model import Model
from tests.gpu.serving import CudaServer, Request, StepStamps

PROMPT_TOKENS: Final = 256
WARM_UP_STEPS: Final = 100
MIXED_TOKEN_MAX: Final = 2048
MIXED_REQUESTS_A_ROW: Final = 4
MIXED_PROMPTS: Final = (128, 896)
MIXED_OUTPUTS: Final = (64, 448)
SEED: Final = 0


def summary(steps: Sequence[RecordedStep], unprofiled: Sequence[StepStamps]) -> dict[str, Any]:
    """What was found of steps of one kind; times in µs a step, shares of the stamps' spans.

    Args:
        steps: at least one.
        unprofiled: of steps of the same kind that ran just before.
    """
    stamped_us = [step.stamped_us for step in steps]
    profiled_us = sum(step.profiled_us for step in steps)
    busy_us = sum(step.busy_us() for step in steps)
    holes_us = [hole for step in steps for hole in step.holes_us()]
    before_us = [(each.finished_ns - each.started_ns) / 1e3 for each in unprofiled]
    return {
        "steps": len(steps),
        "kernels_per_step": round(sum(len(step.kernels) for step in steps) / len(steps), 1),
        "stamped_us": round(sum(stamped_us) / len(steps), 2),
        "profiled_us": round(profiled_us / len(steps), 2),
        "busy_us": round(busy_us / len(steps), 2),
        "busy_share": round(busy_us / profiled_us, 5),
        "busy_share_of_stamped": round(busy_us / sum(stamped_us), 5),
        "hole_us_max": round(max(holes_us, default=0.0), 2),
        "hole_us_mean": round(statistics.fmean(holes_us), 3) if holes_us else 0.0,
        "stamped_us_p50": round(statistics.median(stamped_us), 2),
        "stamped_us_p50_without_profiler": (
            round(statistics.median(before_us), 2) if before_us else None
        ),
    }


def check(server: CudaServer, step_count: int) -> dict[str, Any]:
    """Runs the work that `server` has; one summary a kind of step, and one of all."""
    before = run_steps(server, WARM_UP_STEPS)[WARM_UP_STEPS // 2 :]
    steps = record(server, step_count)
    found = {"all": summary(steps, before)}
    for name, is_decode in (("decode_only", True), ("with_prefill", False)):
        own = [step for step in steps if step.is_decode == is_decode]
        own_before = [each for each in before if (each.row_count == each.token_count) == is_decode]
        if own:
            found[name] = summary(own, own_before)
    return found


def decode(model: Model, backend: str, batch: int, step_count: int) -> dict[str, Any]:
    """`batch` requests of one size; everything but the first steps decodes."""
    new_tokens = WARM_UP_STEPS + step_count + 60
    draw = np.random.default_rng(SEED)
    server = CudaServer(
        model,
        backend=backend,
        row_max=batch,
        token_max=max(8192, batch),
        context_length=PROMPT_TOKENS + new_tokens,
    )
    for _ in range(batch):
        prompt = draw.integers(0, model.shape.vocab_size, PROMPT_TOKENS).tolist()
        server.submit(Request(prompt, new_tokens))
    # The prefill is over when all rows decode for the first time.
    while not server.stamps or server.stamps[-1].token_count != batch:
        server.turn()
    found = check(server, step_count)
    server.close()
    return found


def mixed_server(model: Model, backend: str, batch: int) -> CudaServer:
    """A server with more requests than rows, of many sizes: a prompt is read whenever one ends."""
    server = CudaServer(
        model,
        backend=backend,
        row_max=batch,
        token_max=max(MIXED_TOKEN_MAX, batch),
        context_length=MIXED_PROMPTS[1] + MIXED_OUTPUTS[1],
    )
    make_ready(server, batch)
    draw = np.random.default_rng(SEED)
    for _ in range(MIXED_REQUESTS_A_ROW * batch):
        prompt_tokens = int(draw.integers(MIXED_PROMPTS[0], MIXED_PROMPTS[1] + 1))
        prompt = draw.integers(0, model.shape.vocab_size, prompt_tokens).tolist()
        new_tokens = int(draw.integers(MIXED_OUTPUTS[0], MIXED_OUTPUTS[1] + 1))
        server.submit(Request(prompt, new_tokens))
    return server


def mixed(model: Model, backend: str, batch: int, step_count: int) -> dict[str, Any]:
    """Steps of which some read prompts."""
    server = mixed_server(model, backend, batch)
    found = check(server, step_count)
    server.close()
    return found


def main(arguments: list[str]) -> int:
    """Prints a line a kind of step of each load."""
    parser = argparse.ArgumentParser(prog="check_stamps", description=__doc__)
    parser.add_argument("--preset", default="llama-8b", help="architecture (llama-8b)")
    parser.add_argument("--batch", type=int, default=32, help="rows of a step (32)")
    parser.add_argument("--steps", type=int, default=200, help="recorded steps a load (200)")
    parser.add_argument("--json", type=Path, help="write what was found to this file as well")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        parser.error("torch finds no GPU")
    model, backend = load(options.preset)
    found: dict[str, Any] = {
        **machine(backend),
        "preset": options.preset,
        "batch": options.batch,
        "command": "python -m benchmarks.check_stamps " + " ".join(arguments),
    }
    for name, run in (("decode", decode), ("mixed", mixed)):
        found[name] = run(model, backend, options.batch, options.steps)
        for kind, values in found[name].items():
            print(f"{name}, {kind.replace('_', ' ')}:")
            for label, value in values.items():
                print(f"    {label:<34} {value}", flush=True)
        gc.collect()
        torch.cuda.empty_cache()
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
