"""The CUDA device under the real core, with every kernel; `test_traps` takes its guards out."""

from __future__ import annotations

import logging
import re
import warnings
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from gapless.executor import buckets
from gapless.executor.attention_backends import FA3, FLASHINFER, available_backends
from gapless.executor.model import Model
from gapless.protos.sampling import Sampling
from tests.gpu.serving import CudaServer, Oracle, Request, head_shape, random_model

TIE_BOUND = 0.06
"""Logits this close in float32 may change places in bfloat16 (their deviation is about 0.65)."""


@pytest.fixture(scope="module")
def model() -> Model:
    return random_model()


@pytest.fixture(scope="module")
def oracle(model: Model) -> Oracle:
    return Oracle(model)


@pytest.fixture(params=[FLASHINFER, FA3], scope="module")
def backend(request: pytest.FixtureRequest, model: Model) -> str:
    name = str(request.param)
    if name not in available_backends(head_shape(model), windows=False, block_tokens=16):
        pytest.skip(f"{name} is not installed")
    return name


@pytest.fixture
def server(model: Model, backend: str) -> Iterator[CudaServer]:
    server = CudaServer(model, backend=backend)
    yield server
    server.close()


def prompts(count: int, seed: int = 0, longest: int = 90) -> list[list[int]]:
    random = np.random.default_rng(seed)
    return [random.integers(0, 4096, random.integers(1, longest)).tolist() for _ in range(count)]


def test_depth_1_and_2_give_the_same_tokens(model: Model, backend: str) -> None:
    requests = [Request(prompt, 40) for prompt in prompts(16)]
    tokens = []
    for depth in (1, 2):
        server = CudaServer(model, backend=backend, depth=depth)
        tokens.append(server.serve(requests))
        assert (server.carried_count > 0) == (depth == 2), server.carried_count
        server.close()
    assert tokens[0] == tokens[1]


def test_staying_awake_gives_the_same_tokens(model: Model, backend: str) -> None:
    requests = [Request(prompt, 40) for prompt in prompts(16)]
    tokens = []
    for is_wakeful in (False, True):
        server = CudaServer(model, backend=backend, is_wakeful=is_wakeful)
        tokens.append([server.serve(requests) for _ in range(3)])
        server.close()
    assert tokens[0] == tokens[1]


def test_ends_and_admissions_in_the_same_cycle(server: CudaServer, oracle: Oracle) -> None:
    """Many short requests over few seats: rows change hands in every step."""
    requests = [Request(prompt, 1 + index % 5) for index, prompt in enumerate(prompts(300, 1, 40))]
    together = server.serve(requests)
    assert [len(tokens) for tokens in together] == [request.max_new_tokens for request in requests]
    for request, tokens in zip(requests, together, strict=True):
        assert oracle.shortfall(request.prompt, tokens) < TIE_BOUND


def test_a_surplus_row_changes_nothing(server: CudaServer) -> None:
    """Stop tokens are found one step late; neighbours are not disturbed."""
    requests = [Request(prompt, 30) for prompt in prompts(12, 2)]
    plain = server.serve(requests)
    stops = [tokens[index % 29] for index, tokens in enumerate(plain)]
    stopped = server.serve(
        [
            Request(request.prompt, 30, stop_tokens=(stop,))
            for request, stop in zip(requests, stops, strict=True)
        ]
    )
    for tokens, stop, whole in zip(stopped, stops, plain, strict=True):
        assert tokens == whole[: whole.index(stop) + 1]


def test_idle_and_wake_a_thousand_times(server: CudaServer) -> None:
    prompt = prompts(1, 3)[0]
    expected = server.serve([Request(prompt, 2)])
    for _ in range(1000):
        assert server.serve([Request(prompt, 2)]) == expected


@pytest.mark.parametrize("length", [15, 16, 17, 31, 32, 33])
def test_lengths_at_block_borders(server: CudaServer, length: int) -> None:
    prompt = prompts(1, 4, 64)[0] * 40
    whole = server.serve([Request(prompt[:length], 40)])[0]
    for new in (1, 2, 16, 17):
        assert server.serve([Request(prompt[:length], new)])[0] == whole[:new]


@pytest.mark.parametrize("wanted_min", [0, buckets.WANTED_MIN])
def test_every_row_count_of_every_bucket(
    model: Model, backend: str, oracle: Oracle, wanted_min: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each row, the padding behind it whatever it is, continues a prompt of its own.

    With each bucket's own graph, and with those that are made at the start.
    """
    monkeypatch.setattr(buckets, "WANTED_MIN", wanted_min)
    server = CudaServer(model, backend=backend, row_max=33, context_length=128)
    for count in range(1, 34):
        requests = [Request(prompt, 4) for prompt in prompts(count, count, 40)]
        for request, tokens in zip(requests, server.serve(requests), strict=True):
            assert oracle.shortfall(request.prompt, tokens) < TIE_BOUND, count
    server.close()


@pytest.mark.parametrize(("row_max", "token_max"), [(1, 8), (3, 20), (3, 100), (64, 64), (72, 100)])
def test_slots_of_odd_sizes(
    model: Model, backend: str, oracle: Oracle, row_max: int, token_max: int
) -> None:
    """Buckets end where the slot does; prompts share steps with few rows and with many."""
    server = CudaServer(
        model, backend=backend, row_max=row_max, token_max=token_max, context_length=64
    )
    requests = [Request(prompt, 6) for prompt in prompts(2 * row_max + 1, row_max, 40)]
    for request, tokens in zip(requests, server.serve(requests), strict=True):
        assert oracle.shortfall(request.prompt, tokens) < TIE_BOUND
    server.close()


def test_preemption_and_chunks_give_whole_answers(
    model: Model, backend: str, oracle: Oracle
) -> None:
    server = CudaServer(
        model, backend=backend, block_count=40, chunk_tokens_max=16, context_length=256
    )
    requests = [Request(prompt, 60) for prompt in prompts(12, 5)]
    served = server.serve(requests)
    for request, tokens in zip(requests, served, strict=True):
        assert len(tokens) == 60
        assert oracle.shortfall(request.prompt, tokens) < TIE_BOUND
    assert server.core.stats(0.0).preemptions_total > 0
    server.close()


def test_random_rows_repeat_with_their_seed(server: CudaServer) -> None:
    mixed = [
        Request(
            prompt,
            20,
            Sampling(temperature=0.8 * (index % 3), top_k=50 * (index % 2), top_p=0.9, seed=index),
        )
        for index, prompt in enumerate(prompts(12, 6))
    ]
    assert server.serve(mixed) == server.serve(mixed)


def test_nothing_waits_and_nothing_runs_on_the_default_stream(server: CudaServer) -> None:
    from torch.autograd import DeviceType  # type: ignore[attr-defined]
    from torch.profiler import ProfilerActivity, profile

    requests = [Request(prompt, 30) for prompt in prompts(16, 7)]
    server.serve(requests)  # every graph and kernel is there
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with profile(activities=[ProfilerActivity.CUDA]) as profiled:
            torch.cuda.set_sync_debug_mode("error")
            try:
                server.serve(requests)
            finally:
                torch.cuda.set_sync_debug_mode("default")
    streams = {
        event.device_resource_id
        for event in profiled.events()
        if event.device_type == DeviceType.CUDA
    }
    default = torch.cuda.default_stream().stream_id
    assert streams
    assert default not in streams, streams


def test_no_step_allocates_device_memory(server: CudaServer) -> None:
    requests = [Request(prompt, 60) for prompt in prompts(16, 8)]
    server.serve(requests)
    before = torch.cuda.memory_stats()["num_device_alloc"]
    server.serve(requests)
    assert torch.cuda.memory_stats()["num_device_alloc"] == before


def test_the_slots_share_the_memory_of_their_graphs(
    model: Model, backend: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        CudaServer(model, backend=backend).close()
    found = re.search(r"graphs: (\S+) MiB for one slot, (\S+) MiB for both", caplog.text)
    assert found is not None, caplog.text
    one, both = map(float, found.groups())
    assert 0 < one <= both < 1.1 * one
    assert re.search(r"peak device memory: \d+\.\d\d GiB", caplog.text), caplog.text
