"""Where one step spends its time: ``python -m benchmarks.profile_step FOLDER``, on a GPU.

Writes ``kernels.json`` and ``kernels.md`` into the folder: for some batch sizes, and for steps that
read prompts as well, the parts of a step beside the floor of each, and its kernels. Times are the
profiler's; a step under it takes a little longer than without it.

A kernel may begin while the one before it ends, and then waits for it. So that the parts add up to
the step, a kernel's own time counts from where the kernels before it had ended.
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

from benchmarks.check_stamps import mixed_server
from benchmarks.kernel_record import (
    Kernel,
    RecordedStep,
    load,
    machine,
    record,
    run_steps,
)
from gapless.executor.model import Model
from tests.gpu.serving import CudaServer, Request

BATCHES: Final = (1, 32, 256)
TOKEN_MAX: Final = 8192
WARM_UP_STEPS: Final = 20
NAME_MAX: Final = 90
"""Characters of a kernel's name that the table shows."""
SHARE_MIN: Final = 0.001
"""Kernels of less are one row of the table."""
SEED: Final = 0
READ_BANDWIDTH_TB_S: Final = 4.39
"""Measured on an H200; what the floors of memory-bound parts are made of."""
MULTIPLY_TFLOPS: Final = 790.0
"""Measured on an H200, bf16; what the floor of products over many tokens is made of."""

PRODUCTS: Final = ("_streamed_linear", "nvjet", "gemm", "cutlass", "splitK", "cublas")
ATTENTION: Final = ("flash", "Flash", "MergeStates", "attention")
BETWEEN: Final = ("_add_rms_norm", "_rotate_and_store", "_silu_and_multiply")
PARTS: Final = ("products", "attention", "norms, rotary, SwiGLU", "head", "sampling", "rows")


def parts_of(step: RecordedStep) -> dict[str, float]:
    """Own time of each part of a step, µs. The head is the last product; after it, one samples."""
    own_us = step.own_us()
    products = [k for k, kernel in enumerate(step.kernels) if _is(kernel, PRODUCTS)]
    head = products[-1] if products else len(own_us)
    found = dict.fromkeys(PARTS, 0.0)
    for k, (kernel, us) in enumerate(zip(step.kernels, own_us, strict=True)):
        if k == head:
            part = "head"
        elif k > head:
            part = "sampling"
        elif _is(kernel, PRODUCTS):
            part = "products"
        elif _is(kernel, ATTENTION):
            part = "attention"
        else:
            part = "norms, rotary, SwiGLU" if _is(kernel, BETWEEN) else "rows"
        found[part] += us
    return found


def _is(kernel: Kernel, names: Sequence[str]) -> bool:
    return any(name in kernel.name for name in names)


def table(steps: Sequence[RecordedStep]) -> list[dict[str, Any]]:
    """The kernels of a mean step by their own time, the longest first."""
    own_us: dict[str, list[float]] = defaultdict(list)
    for step in steps:
        for kernel, us in zip(step.kernels, step.own_us(), strict=True):
            own_us[kernel.name].append(us)
    total_us = sum(map(sum, own_us.values()))
    rows = [
        {
            "name": name,
            "calls_per_step": round(len(each) / len(steps), 2),
            "us_per_step": round(sum(each) / len(steps), 2),
            "us_per_call": round(sum(each) / len(each), 2),
            "share": round(sum(each) / total_us, 4),
        }
        for name, each in own_us.items()
    ]
    return sorted(rows, key=lambda row: -float(row["us_per_step"]))


def parts_table(steps: Sequence[RecordedStep], floors_us: dict[str, float]) -> list[dict[str, Any]]:
    """The parts of a mean step, in PARTS' order, each with its floor if it has one."""
    sums = [parts_of(step) for step in steps]
    return [
        {
            "part": part,
            "us": round(statistics.fmean(each[part] for each in sums), 1),
            "floor_us": round(floors_us[part], 1) if part in floors_us else None,
        }
        for part in PARTS
    ]


def floors_us(model: Model, rows: int, tokens: int, context: float) -> dict[str, float]:
    """The least time for what the parts must read or multiply, µs.

    Args:
        model: of the step.
        rows: of the step, each with `context` tokens to read.
        tokens: of the step; with many of them the products are bound by arithmetic.
        context: mean over the rows.
    """
    shape = model.shape
    module: Any = model.module
    head = module.lm_head.weight.numel()
    layers = sum(each.numel() for each in module.model.layers.parameters())
    bytes_us = shape.dtype.itemsize / READ_BANDWIDTH_TB_S / 1e6
    values_a_token = 2 * shape.layer_count * shape.kv_head_count * shape.head_dim
    return {
        "products": max(layers * bytes_us, 2 * layers * tokens / MULTIPLY_TFLOPS / 1e6),
        "attention": rows * context * values_a_token * bytes_us,
        "head": head * bytes_us,
    }


def markdown(found: dict[str, Any]) -> str:
    """The tables of all loads."""
    lines = [
        "# Kernels of one step",
        "",
        f"{found['preset']}, bf16; {found['gpu']}, torch {found['torch']}, attention by "
        f"{found['attention']}. µs are of a mean step. A kernel counts from where those before it "
        "had ended. Floors: bytes at 4.39 TB/s, products of many tokens at 790 TFLOP/s.",
    ]
    for load_ in found["loads"]:
        total_us = sum(row["us"] for row in load_["parts"])
        lines += [
            "",
            f"## {load_['name']}",
            "",
            f"A step takes {load_['step_us_mean']:.0f} µs by its stamps (without profiler, p50: "
            f"{load_['step_us_p50_without_profiler']:.0f} µs). Its parts add up to "
            f"{total_us:.0f} µs, {100 * total_us / load_['step_us_mean']:.1f} % of it.",
            "",
            "| part | µs | floor |",
            "| --- | ---: | ---: |",
        ]
        lines += [f"| {row['part']} | {row['us']:.0f} | {_floor(row)} |" for row in load_["parts"]]
        lines += ["", "| kernel | calls | µs | share |", "| --- | ---: | ---: | ---: |"]
        shown = [row for row in load_["kernels"] if row["share"] >= SHARE_MIN]
        lines += [
            f"| `{_short(row['name'])}` | {row['calls_per_step']:g} | {row['us_per_step']:.1f} "
            f"| {100 * row['share']:.1f} % |"
            for row in shown
        ]
        others = [row for row in load_["kernels"] if row["share"] < SHARE_MIN]
        lines += [
            f"| {len(others)} others | {sum(row['calls_per_step'] for row in others):g} "
            f"| {sum(row['us_per_step'] for row in others):.1f} "
            f"| {100 * sum(row['share'] for row in others):.1f} % |"
        ]
    return "\n".join(lines) + "\n"


def _floor(row: dict[str, Any]) -> str:
    return "" if row["floor_us"] is None else f"{row['floor_us']:.0f}"


def _short(name: str) -> str:
    shown = name.replace("|", "¦").replace("`", "'")
    return shown if len(shown) <= NAME_MAX else shown[: NAME_MAX - 1] + "…"


def summary(
    name: str, steps: Sequence[RecordedStep], before_us: list[float], floors: dict[str, float]
) -> dict[str, Any]:
    """What is written of one load."""
    return {
        "name": name,
        "steps": len(steps),
        "step_us_mean": round(statistics.fmean(step.stamped_us for step in steps), 2),
        "step_us_p50_without_profiler": round(statistics.median(before_us), 2),
        "busy_us": round(statistics.fmean(step.busy_us() for step in steps), 2),
        "parts": parts_table(steps, floors),
        "kernels": table(steps),
    }


def profile_batch(
    model: Model, backend: str, batch: int, prompt_tokens: int, step_count: int
) -> dict[str, Any]:
    """Steps in which `batch` rows decode."""
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
    context = prompt_tokens + WARM_UP_STEPS + step_count / 2
    return summary(
        f"Batch {batch}, context {context:.0f}",
        steps,
        [(each.finished_ns - each.started_ns) / 1e3 for each in before],
        floors_us(model, batch, batch, context),
    )


def profile_prompts(model: Model, backend: str, batch: int, step_count: int) -> dict[str, Any]:
    """Steps of a mixed load that read prompts beside the rows that decode."""
    server = mixed_server(model, backend, batch)
    before = run_steps(server, WARM_UP_STEPS)
    steps = [step for step in record(server, step_count) if not step.is_decode]
    server.close()
    tokens = statistics.fmean(step.stamps.token_count for step in steps)
    rows = statistics.fmean(step.stamps.row_count for step in steps)
    return summary(
        f"With prompts: {tokens:.0f} tokens in {rows:.0f} rows",
        steps,
        [
            (each.finished_ns - each.started_ns) / 1e3
            for each in before
            if each.row_count != each.token_count
        ],
        floors_us(model, 0, int(tokens), 0) | {"attention": 0.0},
    )


def main(arguments: list[str]) -> int:
    """Measures, writes, and prints the tables."""
    parser = argparse.ArgumentParser(prog="profile_step", description=__doc__)
    parser.add_argument("folder", type=Path, help="receives kernels.json and kernels.md")
    parser.add_argument("--preset", default="llama-8b", help="architecture (llama-8b)")
    parser.add_argument("--batch", type=int, nargs="*", default=BATCHES, help="rows (1 32 256)")
    parser.add_argument("--prompts", type=int, default=256, help="rows with prompts; 0: none (256)")
    parser.add_argument("--prompt", type=int, default=256, help="tokens of each prompt (256)")
    parser.add_argument("--steps", type=int, default=40, help="recorded steps a load (40)")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        parser.error("torch finds no GPU")
    model, backend = load(options.preset)
    loads = []
    for batch in options.batch:
        loads.append(profile_batch(model, backend, batch, options.prompt, options.steps))
        gc.collect()
        torch.cuda.empty_cache()
    if options.prompts:
        loads.append(profile_prompts(model, backend, options.prompts, options.steps))
    found = {
        **machine(backend),
        "preset": options.preset,
        "command": "python -m benchmarks.profile_step " + " ".join(arguments),
        "loads": loads,
    }
    options.folder.mkdir(parents=True, exist_ok=True)
    (options.folder / "kernels.json").write_text(json.dumps(found, indent=1) + "\n")
    text = markdown(found)
    (options.folder / "kernels.md").write_text(text)
    print(text, end="")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
