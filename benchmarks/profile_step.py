"""Where one decode step spends its time: ``python -m benchmarks.profile_step FOLDER``, on a GPU.

Writes ``kernels.json`` and ``kernels.md`` into the folder: for some batch sizes, each kernel by the
time that it takes of a step. Times are the profiler's; a step under it takes a little longer than
without it.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from benchmarks.kernel_record import RecordedStep, load, machine, record, run_steps
from gapless.executor.model import Model
from tests.gpu.serving import CudaServer, Request

BATCHES: Final = (1, 32, 256)
TOKEN_MAX: Final = 8192
WARM_UP_STEPS: Final = 20
NAME_MAX: Final = 90
"""Characters of a kernel's name that the table shows."""
SEED: Final = 0


def table(steps: Sequence[RecordedStep]) -> list[dict[str, Any]]:
    """The kernels of a mean step, the longest first."""
    durations_us: dict[str, list[float]] = defaultdict(list)
    for step in steps:
        for kernel in step.kernels:
            durations_us[kernel.name].append(kernel.duration_us)
    total_us = sum(map(sum, durations_us.values()))
    rows = [
        {
            "name": name,
            "calls_per_step": round(len(each) / len(steps), 2),
            "us_per_step": round(sum(each) / len(steps), 2),
            "us_per_call": round(sum(each) / len(each), 2),
            "share": round(sum(each) / total_us, 4),
        }
        for name, each in durations_us.items()
    ]
    return sorted(rows, key=lambda row: -float(row["us_per_step"]))


def markdown(found: dict[str, Any]) -> str:
    """The tables of all batch sizes."""
    lines = [
        "# Kernels of one decode step",
        "",
        f"{found['preset']}, bf16, prompts of {found['prompt']} tokens; {found['gpu']}, torch "
        f"{found['torch']}, attention by {found['attention']}. µs are of a mean step.",
    ]
    for batch in found["batches"]:
        lines += [
            "",
            f"## Batch {batch['batch']}",
            "",
            f"A step takes {batch['step_us_p50']:.0f} µs by its stamps (without profiler "
            f"{batch['step_us_p50_without_profiler']:.0f} µs); kernels run for "
            f"{batch['busy_us']:.0f} µs of it.",
            "",
            "| kernel | calls | µs | share |",
            "| --- | ---: | ---: | ---: |",
        ]
        lines += [
            f"| `{_short(row['name'])}` | {row['calls_per_step']:g} | {row['us_per_step']:.1f} "
            f"| {100 * row['share']:.1f} % |"
            for row in batch["kernels"]
        ]
    return "\n".join(lines) + "\n"


def _short(name: str) -> str:
    shown = name.replace("|", "¦").replace("`", "'")
    return shown if len(shown) <= NAME_MAX else shown[: NAME_MAX - 1] + "…"


def profile_batch(
    model: Model, backend: str, batch: int, prompt_tokens: int, step_count: int
) -> dict[str, Any]:
    """Kernels of steps in which `batch` rows decode."""
    prefill_steps = 1 + batch * prompt_tokens // TOKEN_MAX
    new_tokens = prefill_steps + WARM_UP_STEPS + step_count + 20
    server = CudaServer(
        model,
        backend=backend,
        row_max=batch,
        token_max=max(TOKEN_MAX, batch),
        context_length=prompt_tokens + new_tokens,
    )
    draw = np.random.default_rng(SEED)
    for _ in range(batch):
        prompt = draw.integers(0, model.shape.vocab_size, prompt_tokens).tolist()
        server.submit(Request(prompt, new_tokens))
    while not server.stamps or server.stamps[-1].token_count != batch:
        server.turn()
    before = run_steps(server, WARM_UP_STEPS)
    steps = record(server, step_count)
    server.close()
    assert all(step.is_decode and step.stamps.row_count == batch for step in steps), batch
    spans_us = [(each.finished_ns - each.started_ns) / 1e3 for each in before]
    return {
        "batch": batch,
        "steps": len(steps),
        "step_us_p50": round(statistics.median(step.stamped_us for step in steps), 2),
        "step_us_p50_without_profiler": round(statistics.median(spans_us), 2),
        "busy_us": round(statistics.fmean(step.busy_us() for step in steps), 2),
        "kernels": table(steps),
    }


def main(arguments: list[str]) -> int:
    """Measures, writes, and prints the tables."""
    parser = argparse.ArgumentParser(prog="profile_step", description=__doc__)
    parser.add_argument("folder", type=Path, help="receives kernels.json and kernels.md")
    parser.add_argument("--preset", default="llama-8b", help="architecture (llama-8b)")
    parser.add_argument("--batch", type=int, nargs="+", default=BATCHES, help="rows (1 32 256)")
    parser.add_argument("--prompt", type=int, default=256, help="tokens of each prompt (256)")
    parser.add_argument("--steps", type=int, default=40, help="recorded steps a batch (40)")
    options = parser.parse_args(arguments)
    model, backend = load(options.preset)
    batches = []
    for batch in options.batch:
        batches.append(profile_batch(model, backend, batch, options.prompt, options.steps))
        gc.collect()
        torch.cuda.empty_cache()
    found = {
        **machine(backend),
        "preset": options.preset,
        "prompt": options.prompt,
        "command": "python -m benchmarks.profile_step " + " ".join(arguments),
        "batches": batches,
    }
    options.folder.mkdir(parents=True, exist_ok=True)
    (options.folder / "kernels.json").write_text(json.dumps(found, indent=1) + "\n")
    text = markdown(found)
    (options.folder / "kernels.md").write_text(text)
    print(text, end="")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
