"""Gapless and transformers on this machine's CPU, in turns: ``python -m benchmarks.cpu_peers``.

Each round measures, at each batch size, the server (`gapless.bench`: scheduler and executor as
served) and both ways that transformers has to continue a batch, `generate` and `generate_batch`,
with the same model folder, dtypes and lengths; greedy, without end tokens. What is loaded stays
loaded, and everybody has done the same work once before it counts. Of several rounds, in each of
which everybody runs once, the least time counts: on a machine that others use as well, nobody is
ever too fast.

Writes one object a measurement, as `gapless bench` does, and prints a table with the ratio of
Gapless to the better of the others in any dtype.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from gapless.bench import machine
from gapless.bench.numbers import count
from gapless.bench.sizes import find_model

RESULTS: Final = Path(__file__).parent / "results" / "cpu.json"
PEER_MODES: Final = ("generate", "generate_batch")
WORST_RATIO: Final = 1.5
"""What is asked of Gapless at each batch size."""

Row = dict[str, Any]


@dataclasses.dataclass(frozen=True, slots=True)
class Work:
    """Requests of one size, all there at the start. Lengths are in tokens."""

    batch: int
    prompt: int
    new: int


# ------------------------------------------------------------------ the peer, a process of its own


def run_peer(folder: str, dtype: str, mode: str, prompt: int, new: int) -> None:
    """Answers each batch size on stdin with seconds and processor seconds on stdout."""
    import torch
    from transformers import AutoModelForCausalLM

    attention = "sdpa" if mode == "generate" else "paged|sdpa"
    model = AutoModelForCausalLM.from_pretrained(  # type: ignore[no-untyped-call]
        folder, dtype=getattr(torch, dtype), attn_implementation=attention
    ).eval()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever else is printed is no answer
    random = torch.Generator().manual_seed(0)
    for line in sys.stdin:
        prompts = torch.randint(20, model.config.vocab_size, (int(line), prompt), generator=random)
        begin_s, begin_cpu_s = time.perf_counter(), time.process_time()
        count = PEERS[mode](model, prompts, new)
        seconds, cpu_s = time.perf_counter() - begin_s, time.process_time() - begin_cpu_s
        assert count == int(line) * new, (count, line, new)
        print(json.dumps({"seconds": seconds, "cpu_s": cpu_s}), file=answers, flush=True)


def _generate(model: Any, prompts: Any, new: int) -> int:
    """Continues the batch; how many tokens came out."""
    import torch

    output = model.generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        do_sample=False,
        max_new_tokens=new,
        min_new_tokens=new,
        pad_token_id=0,
    )
    return int(output.numel() - prompts.numel())


def _generate_batch(model: Any, prompts: Any, new: int) -> int:
    from transformers import ContinuousBatchingConfig, GenerationConfig

    batch, prompt = prompts.shape
    outputs = model.generate_batch(
        prompts.tolist(),
        generation_config=GenerationConfig(  # type: ignore[no-untyped-call]
            do_sample=False, max_new_tokens=new, eos_token_id=-1, pad_token_id=0
        ),
        continuous_batching_config=ContinuousBatchingConfig(
            page_size=32,
            num_blocks=2 + batch * (1 + (prompt + new) // 32),
            max_batch_tokens=batch * prompt,
            max_requests_per_batch=batch,
            use_cuda_graph=False,
            use_async_batching=False,
        ),
    )
    return sum(len(output.generated_tokens) for output in outputs.values())


PEERS: Final = {"generate": _generate, "generate_batch": _generate_batch}


@contextlib.contextmanager
def peer(folder: str, dtype: str, mode: str, options: argparse.Namespace) -> Iterator[Any]:
    """The process of a peer, ready; a function from batch size to seconds and processor seconds."""
    command = [sys.executable, "-m", "benchmarks.cpu_peers", "--peer", folder, dtype, mode]
    command += ["--prompt", str(options.prompt), "--new", str(options.new)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:

        def measure(batch: int) -> Row:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(f"{batch}\n")
            process.stdin.flush()
            answer = process.stdout.readline()
            if not answer:
                raise SystemExit(f"the peer {mode} ended with status {process.wait()}")
            return dict(json.loads(answer))

        yield measure
        process.kill()


# ------------------------------------------------------------------ both sides


def measure_gapless(model: str, dtype: str, work: Work) -> Row:
    """One measured run of a server, as `gapless bench` describes it."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.json"
        flags = [
            *("--model", model, "--device", "cpu", "--dtype", dtype, "--depth", "2"),
            *("--batch", str(work.batch), "--prompt", str(work.prompt), "--new", str(work.new)),
            *("--json", str(path)),
        ]
        subprocess.run(
            [sys.executable, "-m", "gapless.bench", *flags],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            check=True,
        )
        (row,) = json.loads(path.read_text())
        return dict(row)


def measure_all(options: argparse.Namespace) -> list[Row]:
    """One row a system, mode, dtype and batch size, from its fastest run."""
    source = find_model(options.model).source
    runs: dict[tuple[str, str, str, int], list[Row]] = {}
    with contextlib.ExitStack() as stack:
        peers = {
            (mode, dtype): stack.enter_context(peer(source, dtype, mode, options))
            for dtype in options.dtypes
            for mode in PEER_MODES
        }
        for batch in options.batches:
            work = Work(batch, options.prompt, options.new)
            for number in range(options.rounds + 1):
                for dtype in options.dtypes:
                    if number > 0:
                        found = measure_gapless(source, dtype, work)
                        runs.setdefault(("gapless", "depth2", dtype, batch), []).append(found)
                    for mode in PEER_MODES:
                        answer = peers[mode, dtype](batch)
                        if number > 0:  # the first time is to warm up
                            key = ("transformers", mode, dtype, batch)
                            runs.setdefault(key, []).append(answer)
                _say(f"batch {batch}: round {number} of {options.rounds}")
    return [_row(options, *key, found) for key, found in runs.items()]


def _row(
    options: argparse.Namespace, system: str, mode: str, dtype: str, batch: int, runs: list[Row]
) -> Row:
    best = min(runs, key=lambda run: float(run["seconds"]))
    cpu = best["cpu_s"]
    return {
        "system": system,
        "mode": mode,
        "dtype": dtype,
        "work": {
            "model": options.model,
            **dataclasses.asdict(Work(batch, options.prompt, options.new)),
        },
        "seconds": round(best["seconds"], 4),
        "tokens_per_s": round(batch * options.new / best["seconds"], 1),
        "ms_per_step_p50": best.get("ms_per_step_p50"),
        "ms_per_step_p99": best.get("ms_per_step_p99"),
        "cpu_s": round(sum(cpu.values()) if isinstance(cpu, dict) else cpu, 3),
        "seconds_of_runs": [round(run["seconds"], 4) for run in runs],
        "cores": len(os.sched_getaffinity(0)),
        "gpu": machine.device_name("cpu"),
        "versions": machine.versions(),
        "command": options.command,
        "run_id": options.run_id,
    }


def ratios(rows: Sequence[Row]) -> dict[int, float]:
    """Tokens a second of Gapless over those of the best other, by batch size, in any dtype each."""
    best: dict[tuple[int, bool], float] = {}
    for row in rows:
        key = (row["work"]["batch"], row["system"] == "gapless")
        best[key] = max(best.get(key, 0.0), row["tokens_per_s"])
    return {batch: best[batch, True] / best[batch, False] for batch, ours in best if ours}


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 0, or 1 if a ratio is too small."""
    words = sys.argv[1:] if arguments is None else list(arguments)
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cpu_peers", description=__doc__)
    add = parser.add_argument
    add("--model", default="demo")
    add("--batches", type=_list_of(int), default=[1, 8, 32], metavar="LIST")
    add("--dtypes", type=_list_of(str), default=["bfloat16", "float32"], metavar="LIST")
    add("--prompt", type=int, default=64)
    add("--new", type=int, default=64)
    add("--rounds", type=count, default=3)
    add("--json", type=Path, default=RESULTS)
    add("--peer", nargs=3, metavar=("FOLDER", "DTYPE", "MODE"), help=argparse.SUPPRESS)
    options = parser.parse_args(words)
    if options.peer:
        folder, dtype, mode = options.peer
        run_peer(folder, dtype, mode, options.prompt, options.new)
        return 0
    options.command = f"python -m benchmarks.cpu_peers {shlex.join(words)}".strip()
    options.run_id = f"{time.strftime('%Y%m%d-%H%M%S')}-{uuid.uuid4().hex[:6]}"
    rows = measure_all(options)
    options.json.write_text(json.dumps(rows, indent=1) + "\n")
    for row in rows:
        name = f"{row['system']} {row['mode']}"
        print(
            f"{row['dtype']:9} batch {row['work']['batch']:3} {name:28}"
            f"{row['tokens_per_s']:8.1f} tokens/s, {row['cpu_s']:6.2f} s of processors"
        )
    for batch, ratio in ratios(rows).items():
        print(f"batch {batch}: {ratio:.2f} times the better of the others")
    return 0 if all(ratio >= WORST_RATIO for ratio in ratios(rows).values()) else 1


def _list_of(kind: type) -> Any:
    return lambda text: [kind(part) for part in text.split(",")]


if __name__ == "__main__":
    raise SystemExit(main())
