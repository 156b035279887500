"""Greedy output equals transformers' generate, token for token, however it is computed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from gapless.executor.step import StepRunner
from gapless.protos.sampling import Sampling
from tests.executor.reference import Expected, generated
from tests.executor.serving import InProcessServer, Request, Served, core_config
from tests.executor.steps import make_runner
from tests.models import VOCAB_SIZE, tiny_model_folder

torch.set_num_threads(1)
GREEDY = Sampling(temperature=0.0)
BLOCK_TOKENS = 4
CHUNK = 16
WHOLE = 128
PROMPT_MAX = 70
OUTPUT_MAX = 12
ROW_MAX = 16
LONGEST_BLOCKS = -(-(PROMPT_MAX + OUTPUT_MAX) // BLOCK_TOKENS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model_folder(
        tmp_path_factory.mktemp("models") / "tiny", dtype="float64", context_length=128
    )


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[Expected]:
    module = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    random = np.random.default_rng(1)
    return [
        generated(
            module,
            random.integers(3, VOCAB_SIZE, int(random.integers(1, PROMPT_MAX + 1))).tolist(),
            int(random.integers(OUTPUT_MAX // 2, OUTPUT_MAX + 1)),
        )
        for _ in range(64)
    ]


def serve(
    folder: Path,
    requests: Sequence[Request],
    *,
    batched: bool,
    depth: int,
    chunk_tokens_max: int,
    preempted: bool,
) -> Served:
    """Serves `requests` on the tiny model.

    Preempted: each twice because the core is told to, and in a batch because blocks run out too.
    """
    row_max = ROW_MAX if batched else 1
    block_count = 1 + LONGEST_BLOCKS * (2 if preempted and batched else row_max + 1)
    runner = tiny_runner(folder, row_max, block_count)
    config = core_config(
        runner, depth=depth, chunk_tokens_max=chunk_tokens_max, running_max=row_max
    )
    server = InProcessServer(runner, config)
    return server.serve(requests, rewind_at=(2, 5) if preempted else ())


def tiny_runner(folder: Path, row_max: int, block_count: int) -> StepRunner:
    sequence_tokens_max = min(128, (block_count - 1) * BLOCK_TOKENS)
    return make_runner(
        folder,
        dtype=torch.float64,
        block_count=block_count,
        block_tokens=BLOCK_TOKENS,
        row_max=row_max,
        block_max=-(-sequence_tokens_max // BLOCK_TOKENS),
    )


@pytest.mark.parametrize("preempted", [False, True], ids=["undisturbed", "preempted"])
@pytest.mark.parametrize("chunk_tokens_max", [WHOLE, CHUNK], ids=["whole", "chunked"])
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("batched", [False, True], ids=["alone", "batched"])
def test_greedy_equals_generate(
    folder: Path,
    expected: list[Expected],
    batched: bool,
    depth: int,
    chunk_tokens_max: int,
    preempted: bool,
) -> None:
    served = serve(
        folder,
        [Request(each.prompt, len(each.tokens), GREEDY) for each in expected],
        batched=batched,
        depth=depth,
        chunk_tokens_max=chunk_tokens_max,
        preempted=preempted,
    )
    assert served.tokens == [each.tokens for each in expected]
    # The mixture was what its name says.
    assert served.row_max == 1 if not batched else served.row_max > 4
    assert (served.carried_count > 0) == (depth == 2)
    assert (
        served.preemption_count > 2 * len(expected) - 8
        if preempted
        else not served.preemption_count
    )
    assert (served.query_length_max > CHUNK) == (chunk_tokens_max == WHOLE)


def test_the_tiny_model_varies_with_its_context(expected: list[Expected]) -> None:
    """Otherwise the tests above could not fail."""
    outputs = {tuple(each.tokens[:8]) for each in expected}
    assert len(outputs) > 56
    assert sum(len(set(each.tokens)) for each in expected) > 4 * len(expected)


def test_sampled_tokens_do_not_depend_on_how_they_are_computed(
    folder: Path, expected: list[Expected]
) -> None:
    kinds = [
        Sampling(temperature=0.9),
        GREEDY,
        Sampling(temperature=1.2, top_k=20, top_p=0.9),
        Sampling(min_p=0.05, bias_tokens=(7, 9), bias_values=(2.0, -float("inf"))),
        Sampling(allowed_tokens=tuple(range(20, 120))),
    ]
    requests = [
        Request(
            each.prompt,
            len(each.tokens),
            msgspec.structs.replace(kinds[index % 5], seed=index * 2**58),
        )
        for index, each in enumerate(expected)
    ]
    plain, mixed = (
        serve(
            folder,
            requests,
            batched=disturbed,
            depth=1 + disturbed,
            chunk_tokens_max=CHUNK if disturbed else WHOLE,
            preempted=disturbed,
        )
        for disturbed in (False, True)
    )
    assert plain.tokens == mixed.tokens
    assert plain.tokens[1] == expected[1].tokens
    assert plain.tokens[0] != expected[0].tokens
