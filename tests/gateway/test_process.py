"""The gateway as a process: its ready line, its signals, two of them on one port, what it loads."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest

from gapless.protos import inference_pb2, inference_pb2_grpc
from gapless.protos.messages import FinishReason
from tests.gateway.fake_scheduler import FakeScheduler, facts
from tests.gateway.harness import (
    REVISION,
    collect,
    request,
    token,
    tokens,
    until_serving,
    write_description,
)
from tests.gateway.process import RUN_MODULE, spawn, start
from tests.models import VOCAB_SIZE

pytestmark = pytest.mark.processes


async def started(
    run_folder: Path, *options: str, entry: tuple[str, ...] = RUN_MODULE
) -> tuple[subprocess.Popen[bytes], list[str]]:
    return await asyncio.to_thread(lambda: start(run_folder, *options, entry=entry))


@contextlib.asynccontextmanager
async def scheduler_at(run_folder: Path) -> AsyncIterator[FakeScheduler]:
    write_description(run_folder / "model")
    scheduler = FakeScheduler(run_folder, facts(REVISION, VOCAB_SIZE))
    try:
        yield scheduler
    finally:
        scheduler.close()


async def output_of(process: subprocess.Popen[bytes]) -> tuple[int, str, str]:
    """Exit code, stdout and stderr, once it has ended."""
    out, err = await asyncio.to_thread(process.communicate, None, 60)
    return process.returncode, out.decode(), err.decode()


def test_sigterm_drains_and_exits_well(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with scheduler_at(tmp_path) as scheduler:
            process, (address, _) = await started(
                tmp_path, "--listen", "127.0.0.1:0", "--admin-listen", "127.0.0.1:0"
            )
            async with grpc.aio.insecure_channel(address) as channel:
                await until_serving(channel, serving=True)
                call = inference_pb2_grpc.InferenceServiceStub(channel).Generate(request())
                submit = await scheduler.submitted()
                scheduler.write(submit, [token("a")])
                await call.read()
                process.send_signal(signal.SIGTERM)
                scheduler.finish(submit, FinishReason.MAX_NEW_TOKENS, [token("b")])
                text = ""
                while (response := await call.read()) is not grpc.aio.EOF:
                    text += response.delta.text
                assert text == "ab"
                assert (await output_of(process))[0] == 0
                assert scheduler.goodbyes == 1

    asyncio.run(scenario())


@pytest.mark.parametrize(
    "signals", [(signal.SIGTERM, signal.SIGTERM), (signal.SIGINT, signal.SIGINT)]
)
def test_a_second_signal_forces(tmp_path: Path, signals: tuple[signal.Signals, ...]) -> None:
    async def scenario() -> None:
        async with scheduler_at(tmp_path) as scheduler:
            process, (address,) = await started(tmp_path, "--listen", "127.0.0.1:0")
            async with grpc.aio.insecure_channel(address) as channel:
                await until_serving(channel, serving=True)
                call = inference_pb2_grpc.InferenceServiceStub(channel).Generate(request())
                await scheduler.submitted()
                process.send_signal(signals[0])
                await until_serving(channel, serving=False)
                process.send_signal(signals[1])
                assert (await output_of(process))[0] == 130
                call.cancel()

    asyncio.run(scenario())


def test_lost_scheduler_is_exit_code_3(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with scheduler_at(tmp_path):
            process, (address,) = await started(tmp_path, "--listen", "127.0.0.1:0")
            async with grpc.aio.insecure_channel(address) as channel:
                await until_serving(channel, serving=True)
        code, _, errors = await output_of(process)
        assert code == 3
        assert "the scheduler is lost" in errors

    asyncio.run(scenario())


def test_two_gateways_share_a_port(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with scheduler_at(tmp_path) as scheduler:
            scheduler.plan = tokens("ok")
            one, (address,) = await started(tmp_path, "--listen", "127.0.0.1:0", "--reuse-port")
            two, _ = await started(tmp_path, "--listen", address, "--reuse-port")
            await scheduler.until(lambda: len(scheduler.hellos) == 2)
            while len(scheduler.peers_served) < 2:  # the kernel spreads connections
                options = [("grpc.use_local_subchannel_pool", 1)]
                async with grpc.aio.insecure_channel(address, options) as channel:
                    await until_serving(channel, serving=True)
                    stub = inference_pb2_grpc.InferenceServiceStub(channel)
                    assert (await collect(stub.Generate(request()))).text == "ok"
            for process in (one, two):
                process.send_signal(signal.SIGTERM)
            assert [(await output_of(process))[0] for process in (one, two)] == [0, 0]

    asyncio.run(scenario())


def test_port_that_is_taken(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with scheduler_at(tmp_path):
            one, (address,) = await started(tmp_path, "--listen", "127.0.0.1:0")
            two = spawn(tmp_path, "--listen", address, ready_fd=None)
            code, _, errors = await output_of(two)
            assert code == 1
            assert f"cannot listen on {address}" in errors
            one.send_signal(signal.SIGTERM)
            assert (await output_of(one))[0] == 0

    asyncio.run(scenario())


def test_folder_that_is_no_model(tmp_path: Path) -> None:
    process = spawn(tmp_path, "--listen", "127.0.0.1:0", ready_fd=None)
    code, _, errors = asyncio.run(output_of(process))
    assert code == 1
    assert "cannot serve" in errors
    assert "Traceback" not in errors


REPORT_MODULES = """
import runpy, sys
try:
    runpy.run_module("gapless.gateway", run_name="__main__", alter_sys=True)
finally:
    print(*sorted({name.partition(".")[0] for name in sys.modules}))
"""


def test_running_gateway_has_no_torch(tmp_path: Path) -> None:
    """The entry module serves a whole chat, then says what it has loaded."""

    async def scenario() -> None:
        async with scheduler_at(tmp_path) as scheduler:
            scheduler.plan = tokens("ok")
            process, (address,) = await started(
                tmp_path, "--listen", "127.0.0.1:0", entry=("-c", REPORT_MODULES)
            )
            async with grpc.aio.insecure_channel(address) as channel:
                await until_serving(channel, serving=True)
                stub = inference_pb2_grpc.InferenceServiceStub(channel)
                message = inference_pb2.ChatMessage(role="user", content="hi")
                chat = inference_pb2.ChatPrompt(messages=[message])
                await collect(stub.Generate(request(prompt=inference_pb2.Prompt(chat=chat))))
            process.send_signal(signal.SIGTERM)
            code, loaded, _ = await output_of(process)
            assert code == 0
            assert "grpc" in loaded.split()
            assert "torch" not in loaded.split()

    asyncio.run(scenario())
