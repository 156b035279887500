"""The model that this gateway serves: what its folder says, read once at start.

Must not know: requests, the scheduler. What only the executor knows of the model (context length,
KV pool) comes later, with `Welcome`.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gapless.gateway.end_tokens import read_end_tokens
from gapless.gateway.templates import ChatTemplate
from gapless.gateway.tokenizer import TextTokenizer
from gapless.protos import model_folder

_LOG = logging.getLogger("gapless.gateway")


@dataclasses.dataclass(frozen=True, slots=True)
class DefaultSampling:
    """What an unset field of SamplingParams means for a model."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0

    @classmethod
    def of(cls, generation_config: Mapping[str, Any], vocab_size: int) -> DefaultSampling:
        """Takes what the model's authors recommend in ``generation_config.json``.

        `do_sample` is not looked at: it is how transformers' `generate` chooses its loop and is
        absent from most folders, while a caller who leaves the temperature out expects sampling as
        from any other server. A value out of range is left out, with a warning.
        """
        fields: dict[str, Any] = {}
        ranges = {"temperature": (0.0, 2.0), "top_p": (0.0, 1.0), "min_p": (0.0, 1.0)}
        for name, (low, high) in ranges.items():
            value = generation_config.get(name)
            if value is None:
                continue
            valid = isinstance(value, int | float) and math.isfinite(value) and low <= value <= high
            if valid and not (name == "top_p" and value == 0):
                fields[name] = float(value)
            else:
                _LOG.warning("generation_config.json: %s %r is left out", name, value)
        top_k = generation_config.get("top_k")
        if isinstance(top_k, int) and top_k >= 0:
            fields["top_k"] = min(top_k, vocab_size)
        for name, neutral in (("repetition_penalty", 1.0), ("no_repeat_ngram_size", 0)):
            if generation_config.get(name, neutral) not in (None, neutral):
                _LOG.warning("generation_config.json: %s is not supported and left out", name)
        return cls(**fields)


@dataclasses.dataclass(frozen=True, slots=True)
class ServedModel:
    """Everything that a gateway knows of its model by itself."""

    name: str
    revision: str
    architecture: str
    tokenizer: TextTokenizer
    template: ChatTemplate | None
    end_tokens: tuple[int, ...]
    default_sampling: DefaultSampling

    @classmethod
    def load(cls, folder: Path, name: str) -> ServedModel:
        """Reads a model folder. Raises FileNotFoundError, UnsupportedTokenizer, ValueError."""
        config = _read_json(folder / "config.json")
        generation_path = folder / "generation_config.json"
        generation_config = _read_json(generation_path) if generation_path.is_file() else {}
        architectures = config.get("architectures") or [config.get("model_type", "")]
        tokenizer = TextTokenizer.load(folder)
        template = ChatTemplate.load(folder, tokenizer.control_tokens)
        return cls(
            name=name,
            revision=model_folder.revision(folder),
            architecture=str(architectures[0]),
            tokenizer=tokenizer,
            template=template,
            end_tokens=read_end_tokens(folder, tokenizer, template),
            default_sampling=DefaultSampling.of(generation_config, tokenizer.vocab_size),
        )


def _read_json(path: Path) -> dict[str, Any]:
    content = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds no JSON object")
    return content
