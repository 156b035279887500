"""The sampling kernels at full size against the torch sampler, and a token's independence."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest
import torch
from torch import Tensor

from gapless.protos.sampling import Sampling
from gapless.protos.slots import Features

VOCAB_SIZE = 128_256
ROW_COUNT = 64
TRUNCATED = Features.RANDOM | Features.TRUNCATED

MIXES = {
    "greedy": [Sampling(temperature=0.0)],
    "temperature": [Sampling(temperature=0.2), Sampling(), Sampling(temperature=5.0)],
    "top-k": [Sampling(top_k=k) for k in (1, 50, 5_000, 60_000, 128_255)],
    "top-p": [Sampling(top_p=p) for p in (1e-6, 0.5, 0.9, 0.999)],
    "min-p": [Sampling(min_p=p) for p in (1e-6, 0.05, 1.0)],
    "all": [
        Sampling(temperature=0.0),
        Sampling(temperature=0.7, top_k=50, top_p=0.9),
        Sampling(top_k=30_000, top_p=0.95, min_p=0.001),
        Sampling(temperature=1.5, top_p=0.99),
        Sampling(),
    ],
}


def logits_of_kind(kind: str) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(11)
    values = torch.randn(ROW_COUNT, VOCAB_SIZE, device="cuda", generator=generator)
    if kind == "peaked":
        values[:, 40_000:40_020] += 12.0
    if kind == "skew":  # likely tokens have low ids, as in real vocabularies
        values -= torch.arange(300, 300 + VOCAB_SIZE, device="cuda").log()
    if kind == "ties":
        values = values.round()
    return values if kind == "float32" else values.bfloat16()


def many(samplings: Sequence[Sampling]) -> list[Sampling]:
    """As many as rows, each with a seed of its own."""
    return [
        msgspec.structs.replace(samplings[row % len(samplings)], seed=7919 * row)
        for row in range(ROW_COUNT)
    ]


@pytest.mark.parametrize("kind", ["flat", "peaked", "skew", "ties", "float32"])
@pytest.mark.parametrize("mix", MIXES)
def test_kernels_draw_what_torch_draws(mix: str, kind: str) -> None:
    from tests.executor.drawing import Table

    rows = Table(many(MIXES[mix]), VOCAB_SIZE, torch.device("cuda"))
    logits = logits_of_kind(kind)
    for start in (1, 1_000, 100_000):
        rows.place(range(start, start + ROW_COUNT))
        assert rows.by_kernels(logits, TRUNCATED) == rows.by_torch(logits, TRUNCATED)


def test_a_row_draws_the_same_alone_and_among_others() -> None:
    from tests.executor.drawing import Table

    device = torch.device("cuda")
    samplings = many(MIXES["all"])
    rows = Table(samplings, VOCAB_SIZE, device)
    rows.place([5] * ROW_COUNT)
    logits = logits_of_kind("flat")
    together = rows.by_kernels(logits, TRUNCATED)
    for row in range(8):
        alone = Table([samplings[row]], VOCAB_SIZE, device)
        alone.place([5])
        drawn = alone.by_kernels(logits[row : row + 1].contiguous(), TRUNCATED)
        assert drawn.tokens == [together.tokens[row]]


def test_a_graph_of_the_kernels_draws_again() -> None:
    from tests.executor.drawing import Table

    rows = Table(many(MIXES["all"]), VOCAB_SIZE, torch.device("cuda"))
    rows.place(range(ROW_COUNT))
    logits = logits_of_kind("flat")
    expected = rows.by_torch(logits, TRUNCATED)
    rows.enqueue(logits, TRUNCATED)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        rows.enqueue(logits, TRUNCATED)
    for _ in range(2):
        rows.sampled.zero_()
        graph.replay()
        torch.cuda.synchronize()
        assert rows.sampled[:ROW_COUNT].tolist() == expected.tokens
