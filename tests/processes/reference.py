"""What transformers says: greedy tokens, how clear each choice was, and the text of tokens.

The oracle of the end-to-end tests; runs in the test process and shares no code with the server.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


@dataclass(frozen=True, slots=True)
class Continuation:
    """Greedy output of one prompt."""

    token_ids: list[int]
    gap: float
    """Smallest distance between the two best logits of any step: below the noise of float32
    arithmetic, another order of summation may choose another token."""


class Reference:
    """A model folder as transformers runs it, in float32 or better."""

    def __init__(self, folder: Path, dtype: torch.dtype = torch.float32) -> None:
        torch.set_num_threads(1)
        self._tokenizer = AutoTokenizer.from_pretrained(folder)
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
        self._model.train(False)
        # Defaults of the model (temperature and the like) have no say in a greedy choice.
        for name in ("temperature", "top_p", "top_k", "eos_token_id"):
            setattr(self._model.generation_config, name, None)
        self._model.generation_config.do_sample = False

    @property
    def vocab_size(self) -> int:
        return int(self._model.config.vocab_size)

    @torch.inference_mode()
    def continuations(
        self, prompts: Sequence[Sequence[int]], new_tokens: int
    ) -> list[Continuation]:
        """Of prompts of one length, `new_tokens` each; end tokens do not end them."""
        inputs = torch.tensor([list(prompt) for prompt in prompts])
        output = self._model.generate(
            inputs,
            attention_mask=torch.ones_like(inputs),
            max_new_tokens=new_tokens,
            pad_token_id=0,
            output_logits=True,
            return_dict_in_generate=True,
        )
        best = torch.stack(output.logits).topk(2, dim=-1).values
        gaps = (best[..., 0] - best[..., 1]).min(dim=0).values
        tokens = output.sequences[:, inputs.shape[1] :]
        return [
            Continuation(row.tolist(), float(gap)) for row, gap in zip(tokens, gaps, strict=True)
        ]

    def tokenize(self, text: str) -> list[int]:
        return list(self._tokenizer(text)["input_ids"])

    def text(self, token_ids: Sequence[int]) -> str:
        return str(
            self._tokenizer.decode(
                list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
            )
        )
