"""What transformers' own generate makes of a prompt, for comparison."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch


@dataclasses.dataclass(frozen=True, slots=True)
class Expected:
    """What transformers' own generate makes of a prompt."""

    prompt: list[int]
    tokens: list[int]
    margins: list[float]
    """Distance of the two best logits behind each token before."""


def generated(module: Any, prompt: list[int], max_new_tokens: int) -> Expected:
    """Greedy `generate` of the reference, alone, without any end token."""
    ids = torch.tensor([prompt])
    output = module.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=max_new_tokens,
        eos_token_id=None,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_logits=True,
    )
    best = torch.cat(output.logits).topk(2).values
    return Expected(
        prompt, output.sequences[0, len(prompt) :].tolist(), (best[:, 0] - best[:, 1]).tolist()
    )
