"""Architectures with random weights, for measuring without a checkpoint: ``--model preset:NAME``.

Owns the configurations. The weights are drawn from a fixed seed, so two runs serve the same model.
Called by loading.
"""

from __future__ import annotations

from typing import Any, Final

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
PRESETS: Final = ("llama-8b", "qwen3-8b", "tiny")


def preset_config(name: str) -> PreTrainedConfig:
    """The configuration of a preset, one of PRESETS."""
    match name:
        case "llama-8b":
            return LlamaConfig(**_LLAMA_8B)
        case "qwen3-8b":
            return Qwen3Config(**_QWEN3_8B)
        case "tiny":
            return LlamaConfig(**_TINY)
    raise ValueError(f"preset {name!r} is none of: {', '.join(PRESETS)}")
