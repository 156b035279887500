"""The demo model on the GPU says what transformers' generate says there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from gapless.executor.arenas import PlainArenas
from gapless.executor.attention_backends import GATHER, available_backends
from gapless.executor.model import Model
from tests.executor.test_demo_model import QUESTIONS
from tests.gpu.serving import CudaServer, Request, head_shape
from tests.models import demo_model_folder

NEW_TOKENS = 32
CLEAR_MARGIN = {torch.float32: 1e-3, torch.bfloat16: 0.5}
"""Where the reference's two best logits are closer than this, rounding may choose."""


@pytest.mark.model
@pytest.mark.timeout(600)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("is_fused", [True, False], ids=["fused", "plain"])
def test_the_demo_model_says_what_generate_says(dtype: torch.dtype, is_fused: bool) -> None:
    folder = demo_model_folder()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompts: list[list[int]] = [
        tokenizer(f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n").input_ids
        for question in QUESTIONS
    ]
    device = torch.device("cuda")
    module: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    module.to(device)
    model = Model.load(folder, dtype, device, PlainArenas(device))
    backend = available_backends(head_shape(model), windows=False, block_tokens=16)[0]
    assert (backend == GATHER) == (dtype == torch.float32), backend
    server = CudaServer(model, backend=backend, is_fused=is_fused)
    served = server.serve([Request(prompt, NEW_TOKENS) for prompt in prompts])
    server.close()
    compared = 0
    for prompt, tokens in zip(prompts, served, strict=True):
        # Teacher forcing: one early tie does not hide what comes after it.
        ids = torch.tensor([prompt + tokens], device=device)
        with torch.inference_mode():
            logits = module(input_ids=ids).logits[0, len(prompt) - 1 : -1].float()
        best = logits.topk(2).values
        clear = (best[:, 0] - best[:, 1]) > CLEAR_MARGIN[dtype]
        found = torch.tensor(tokens, device=device)
        assert torch.equal(found[clear], logits.argmax(dim=-1)[clear])
        compared += int(clear.sum())
        if dtype == torch.float32 and bool(clear.all()):
            reference = module.generate(
                ids[:, : len(prompt)],
                attention_mask=torch.ones_like(ids[:, : len(prompt)]),
                do_sample=False,
                max_new_tokens=NEW_TOKENS,
                eos_token_id=None,
                pad_token_id=0,
            )
            assert reference[0, len(prompt) :].tolist() == tokens
    assert compared > 0.6 * NEW_TOKENS * len(prompts), "most of it was compared"
