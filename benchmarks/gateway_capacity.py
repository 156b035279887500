"""What one gateway process carries: ``python -m benchmarks.gateway_capacity [--json FILE]``.

A stand-in scheduler gives every stream a token each step, on time; the gateway is a real process.
The client is h2load (Debian: nghttp2-client), which costs a tenth of one in Python, and one stream
of Python's, the last in each step, that notes when tokens come. Says how much of a core the gateway
took, and how long the newest token of a delta was on its way: if that grows with the run, the
gateway does not keep up.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import random
import shutil
import struct
import sys
import tempfile
import threading
import time
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import grpc
import grpc.aio
import msgspec
import numpy as np

from gapless.bench import machine
from gapless.bench.numbers import count, natural, positive
from gapless.bench.outputs import OutputError, require_writable
from gapless.gateway.validation import FLUSH_INTERVAL_MAX_MS
from gapless.protos import inference_pb2, inference_pb2_grpc
from gapless.protos.messages import Finished, FinishReason, PrefillStarted, Timing, Update
from tests.gateway import harness, process
from tests.gateway.fake_scheduler import LIMITS, FakeScheduler, Live, facts
from tests.models import VOCAB_SIZE

TEXT: Final = "the quick brown fox jumps over a lazy dog "
PROMPT: Final = tuple(harness.tokens("Once upon a time"))
CONTEXT_LENGTH: Final = 9000
CONNECTIONS: Final = 5
SETTLE_S: Final = 0.5
SKIPPED_DELTAS: Final = 2
"""At the beginning, while every stream sends its first."""
FAILED: Final = 1
USAGE: Final = 2
INTERRUPTED: Final = 130

Row = dict[str, Any]


class LoadError(Exception):
    """A load was not carried, or is too small to be measured."""


async def measure(streams: int, step_ms: float, flush_ms: int, steps: int) -> Row:
    """One load: `streams` at once get a token every `step_ms`, for `steps` steps."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        run_folder = Path(folder)
        harness.write_description(run_folder / "model")
        scheduler = FakeScheduler(
            run_folder,
            msgspec.structs.replace(
                facts(harness.REVISION, VOCAB_SIZE), context_length=CONTEXT_LENGTH, row_max=streams
            ),
            msgspec.structs.replace(
                LIMITS, running_max=streams, sequence_tokens_max=CONTEXT_LENGTH
            ),
        )
        try:
            child, addresses = await asyncio.to_thread(
                process.start, run_folder, "--listen", "127.0.0.1:0"
            )
            for pipe in (child.stdout, child.stderr):
                assert pipe is not None
                threading.Thread(target=pipe.read, daemon=True).start()
            try:
                request = _request(steps, flush_ms)
                return await _drive(scheduler, child.pid, addresses[0], request, streams, step_ms)
            finally:
                child.kill()
                child.wait()
        finally:
            scheduler.close()


async def _drive(
    scheduler: FakeScheduler,
    gateway: int,
    address: str,
    request: inference_pb2.GenerateRequest,
    streams: int,
    step_ms: float,
) -> Row:
    others = (streams - 1) // CONNECTIONS * CONNECTIONS
    load = await _start_h2load(address, request, others)
    await scheduler.submitted(others)
    noted = asyncio.create_task(_arrivals(address, request))  # the last in each step
    await scheduler.submitted(others + 1)
    live = list(scheduler.live.values())
    began = tuple(PrefillStarted(each.submit.handle, 0.0) for each in live)
    scheduler.say(Update(handles=b"", tokens=b"", events=began), live[0].peer)
    await asyncio.sleep(SETTLE_S)
    steps = request.stopping.max_new_tokens
    before_s, began_s = _cpu_s(gateway), time.monotonic()
    told_s = await _tell(scheduler, live, steps, step_ms / 1e3)
    cpu_s, seconds = _cpu_s(gateway) - before_s, time.monotonic() - began_s
    output = (await load.communicate())[0].decode()
    if f"{others} succeeded" not in output:
        raise LoadError(f"h2load: {output}")
    deltas = (await noted)[SKIPPED_DELTAS:-1]
    if not deltas:
        raise LoadError(f"{steps} steps are too few to tell anything: give more --steps")
    newest_ms = [1e3 * (came - told_s[first + count - 1]) for came, first, count in deltas]
    oldest_ms = [1e3 * (came - told_s[first]) for came, first, _ in deltas]
    tokens = steps * len(live)
    return {
        "streams": len(live),
        "step_ms": step_ms,
        "flush_interval_ms": request.output.flush_interval_ms,
        "steps": steps,
        "tokens_per_s": round(tokens / seconds, 1),
        "tokens_per_delta": round(float(np.mean([count for _, _, count in deltas])), 2),
        "gateway_cores": round(cpu_s / seconds, 3),
        "gateway_us_per_token": round(1e6 * cpu_s / tokens, 2),
        "newest_token_ms": _spread(newest_ms),
        "newest_token_ms_last_tenth": _spread(newest_ms[-len(newest_ms) // 10 :]),
        "oldest_token_ms": _spread(oldest_ms),
    }


def _request(steps: int, flush_ms: int) -> inference_pb2.GenerateRequest:
    request = inference_pb2.GenerateRequest(model=harness.MODEL_NAME)
    request.prompt.token_ids.ids.extend(PROMPT)
    request.stopping.max_new_tokens = steps
    request.output.flush_interval_ms = flush_ms
    return request


async def _start_h2load(
    address: str, request: inference_pb2.GenerateRequest, streams: int
) -> asyncio.subprocess.Process:
    """`streams` calls at once; their windows never hold the gateway back."""
    body = request.SerializeToString()
    with tempfile.NamedTemporaryFile(delete=False) as file:
        file.write(struct.pack(">BI", 0, len(body)) + body)
    command = ["h2load", "-n", str(streams), "-c", str(CONNECTIONS), "-t", "1", "-w", "20"]
    command += ["-m", str(streams // CONNECTIONS), "-W", "24", "-d", file.name]
    command += ["-H", "content-type: application/grpc", "-H", "te: trailers"]
    command += [f"http://{address}/gapless.v1.InferenceService/Generate"]
    try:
        load = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
        await asyncio.sleep(SETTLE_S)
    finally:
        os.unlink(file.name)
    return load


async def _arrivals(
    address: str, request: inference_pb2.GenerateRequest
) -> list[tuple[float, int, int]]:
    """Of each delta of one stream: when it came, its first token's index, its tokens."""
    found = []
    async with grpc.aio.insecure_channel(address) as channel:
        async for message in inference_pb2_grpc.InferenceServiceStub(channel).Generate(request):
            if message.WhichOneof("event") == "delta":
                delta = message.delta
                found.append((time.monotonic(), delta.first_token_index, delta.token_count))
    return found


async def _tell(
    scheduler: FakeScheduler, live: Sequence[Live], steps: int, step_s: float
) -> list[float]:
    """Says one update a step, the last with all ends; when each was said."""
    draw = random.Random(0)
    pieces = harness.tokens(TEXT)
    handles = array("q", [each.submit.handle for each in live]).tobytes()
    ends = tuple(
        Finished(
            handle=each.submit.handle,
            reason=FinishReason.MAX_NEW_TOKENS,
            completion_tokens=steps,
            cached_prompt_tokens=0,
            preemption_count=0,
            timing=Timing(0.0, 0.0, 0.0),
        )
        for each in live
    )
    began_s, told_s = time.monotonic(), []
    for step in range(steps):
        await asyncio.sleep(max(0.0, began_s + step * step_s - time.monotonic()))
        told_s.append(time.monotonic())
        tokens = array("i", draw.choices(pieces, k=len(live))).tobytes()
        events = ends if step == steps - 1 else ()
        scheduler.say(Update(handles=handles, tokens=tokens, events=events), live[0].peer)
    return told_s


def _cpu_s(pid: int) -> float:
    """Processor time of a process so far, of all its threads: Linux's clock of that process."""
    return time.clock_gettime(~pid << 3 | 2)


def _spread(values: Sequence[float]) -> dict[str, float]:
    names = (("p50", 50), ("p95", 95), ("p99", 99), ("max", 100))
    return {name: round(float(np.percentile(values, rank)), 2) for name, rank in names}


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints a line a load; exit status."""
    parser = argparse.ArgumentParser(prog="gateway_capacity", description=__doc__)
    add = parser.add_argument
    add("--streams", type=_streams, default=256, metavar="N", help="at once, about (256)")
    add("--step-ms", type=positive, default=10.0, metavar="MS", help="between tokens (10)")
    add("--flush-ms", type=_list, default="20,40,0", metavar="LIST", help="intervals (20,40,0)")
    add("--steps", type=_steps, default=1000, metavar="N", help="of each load (1000)")
    add("--json", type=Path, metavar="FILE", help="write what was found to this file as well")
    options = parser.parse_args(arguments)
    try:
        require_writable(options.json)
        if shutil.which("h2load") is None:
            raise LoadError("h2load is missing (Debian: apt install nghttp2-client)")
        rows = _rows(options)
    except OutputError as error:
        print(f"gateway_capacity: {error}", file=sys.stderr)
        return USAGE
    except LoadError as error:
        print(f"gateway_capacity: {error}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        return INTERRUPTED
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")
    return 0


def _rows(options: argparse.Namespace) -> list[Row]:
    """Measures every load and prints its line."""
    rows = []
    for flush_ms in options.flush_ms:
        row = asyncio.run(measure(options.streams, options.step_ms, flush_ms, options.steps))
        row |= {"processor": machine.processor_name(), "cores": os.cpu_count()}
        row |= {"python": platform.python_version(), "grpcio": grpc.__version__}
        rows.append(row)
        newest = row["newest_token_ms"]
        print(
            f"{row['streams']} streams, flush {flush_ms} ms: {row['tokens_per_s']:,.0f} tokens/s, "
            f"{row['gateway_cores']:.2f} cores, {row['gateway_us_per_token']:.1f} µs a token, "
            f"{row['tokens_per_delta']:.2f} tokens a delta, newest token "
            f"{newest['p50']:.1f} / {newest['p95']:.1f} / {newest['max']:.1f} ms",
            flush=True,
        )
    return rows


def _streams(text: str) -> int:
    found = count(text)
    if found <= CONNECTIONS:
        raise argparse.ArgumentTypeError(f"{found} is less than {CONNECTIONS + 1}")
    return found


def _steps(text: str) -> int:
    found, most = count(text), CONTEXT_LENGTH - len(PROMPT)
    if found > most:
        raise argparse.ArgumentTypeError(f"{found} is more than {most}")
    return found


def _list(text: str) -> tuple[int, ...]:
    found = tuple(map(natural, text.split(",")))
    if max(found) > FLUSH_INTERVAL_MAX_MS:
        raise argparse.ArgumentTypeError(f"{max(found)} is more than {FLUSH_INTERVAL_MAX_MS}")
    return found


if __name__ == "__main__":
    sys.exit(main())
