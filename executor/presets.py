"""Architectures with random weights, for measuring without a checkpoint: ``--model preset:NAME``.

Owns the configurations, and what a gateway must have of one. The weights are drawn from a fixed
seed, so two runs serve the same model. Called by loading and by prepare.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, PreTrainedConfig, Qwen3Config

PREFIX: Final = "preset:"
_LLAMA_8B: Final[dict[str, Any]] = {
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-5,
}
_LLAMA_1B: Final[dict[str, Any]] = {
    "vocab_size": 128256,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}
_QWEN3_8B: Final[dict[str, Any]] = {
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
}
_TINY: Final[dict[str, Any]] = {
    "vocab_size": 1024,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
}
PRESETS: Final = ("llama-8b", "llama-1b", "qwen3-8b", "tiny")


def preset_config(name: str) -> PreTrainedConfig:
    """The configuration of a preset, one of PRESETS."""
    match name:
        case "llama-8b":
            return LlamaConfig(**_LLAMA_8B)
        case "llama-1b":
            return LlamaConfig(**_LLAMA_1B)
        case "qwen3-8b":
            return Qwen3Config(**_QWEN3_8B)
        case "tiny":
            return LlamaConfig(**_TINY)
    raise ValueError(f"preset {name!r} is none of: {', '.join(PRESETS)}")


def write_gateway_folder(name: str, folder: Path) -> None:
    """Writes what a gateway reads of a model, without weights, into a folder that exists.

    The first 256 tokens are the bytes, as a checkpoint's byte-level vocabulary has them; each
    further one is a blank and its own number, so that text is as long as a model's is, and can be
    traced back.
    """
    config = preset_config(name)
    (folder / "config.json").write_text(config.to_json_string(use_diff=False))
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    spellings = [*alphabet, *(f"\u0120{number}" for number in range(256, config.vocab_size))]
    vocabulary = {spelling: number for number, spelling in enumerate(spellings)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "revision").write_text(PREFIX + name)
