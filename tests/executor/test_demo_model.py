"""The demo model, served in a batch, says what transformers' generate says."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from gapless.protos.sampling import Sampling
from tests.executor.reference import generated
from tests.executor.serving import InProcessServer, Request, core_config
from tests.executor.steps import make_runner
from tests.models import demo_model_folder

torch.set_num_threads(1)
QUESTIONS = (
    "What is the capital of France?",
    "Name three colours of the rainbow.",
    "Why is the sky blue?",
    "Write one sentence about the sea.",
    "How many legs does a spider have?",
    "Translate 'good morning' into German.",
    "What is 2 + 2?",
    "Who wrote Hamlet?",
    "Give me a word that rhymes with 'light'.",
    "What do bees make?",
    "Is the earth flat? Answer briefly, and say how people found out long ago.",
    "Write a Python function that adds two numbers.",
    "What is the opposite of 'hot'?",
    "Tell me about the moon in two sentences.",
    "Which language is spoken in Brazil?",
    "Continue: once upon a time, in a small village by a river,",
)
NEW_TOKENS = 12
CLEAR_MARGIN = 1e-3
"""Logits of the reference that are closer than this may swap by rounding."""


@pytest.mark.model
@pytest.mark.timeout(900)
def test_the_demo_model_says_what_generate_says() -> None:
    folder = demo_model_folder()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompts: list[list[int]] = [
        tokenizer(f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n").input_ids
        for question in QUESTIONS
    ]
    module = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    expected = [generated(module, prompt, NEW_TOKENS) for prompt in prompts]
    del module

    row_max = len(prompts)
    runner = make_runner(
        folder,
        dtype=torch.float32,
        block_count=1 + 8 * row_max,
        block_tokens=16,
        row_max=row_max,
        block_max=8 * row_max,
    )
    config = core_config(runner, depth=2, chunk_tokens_max=16, running_max=row_max)
    greedy = Sampling(temperature=0.0)
    served = InProcessServer(runner, config).serve(
        [Request(prompt, NEW_TOKENS, greedy) for prompt in prompts]
    )
    compared = 0
    for found, each in zip(served.tokens, expected, strict=True):
        unclear = [k for k, margin in enumerate(each.margins) if margin <= CLEAR_MARGIN]
        length = unclear[0] if unclear else NEW_TOKENS
        assert found[:length] == each.tokens[:length], each.prompt
        compared += length
    assert compared > 0.9 * NEW_TOKENS * len(prompts), "most of it was compared"
