"""The model: transformers' own definition and weights, with the paged attention plugged in.

Owns loading, the checks that make wrong answers impossible (see `Model.load`), and the call of one
packed forward. Knows nothing of rows beyond their last tokens, and nothing of seats or sampling.
Called at start, and by the step.
"""

from __future__ import annotations

import dataclasses
import inspect
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from gapless.executor import probe, weights
from gapless.executor.arenas import Arenas
from gapless.executor.attention import (
    StepAttention,
    UnsupportedModelError,
    packed_logits,
    plug_in,
)
from gapless.executor.kv import KvShape
from gapless.executor.phases import Phases

DTYPES: Final = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}
LAYER_KINDS: Final = frozenset({"full_attention", "sliding_attention"})
ROTARY_OF_BATCH: Final = frozenset({"dynamic", "longrope"})
"""Rotary embeddings that depend on the longest position in the batch: rows would not be independent
of each other, nor of what was in the pool before."""


@dataclasses.dataclass(frozen=True, slots=True)
class ModelShape:
    """What a loaded model is like; the sizes that pool, slots and greeting need."""

    architecture: str
    vocab_size: int
    """Width of the head: tokens that can be sampled."""
    context_length: int
    """Most positions that the model was made for."""
    layer_count: int
    kv_head_count: int
    head_dim: int
    dtype: torch.dtype

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    def kv_shape(self, block_tokens: int) -> KvShape:
        return KvShape(
            layer_count=self.layer_count,
            kv_head_count=self.kv_head_count,
            head_dim=self.head_dim,
            block_tokens=block_tokens,
            dtype=self.dtype,
        )


class Model:
    """A loaded model, its weights in an arena."""

    def __init__(self, module: PreTrainedModel, shape: ModelShape) -> None:
        self.module = module
        self.shape = shape

    @staticmethod
    def load(
        folder: Path,
        dtype: torch.dtype,
        device: torch.device,
        arenas: Arenas,
        phases: Phases | None = None,
    ) -> Model:
        """Loads a model folder, and checks it against transformers' own attention.

        The check computes a few tokens both ways, so that a model whose attention is not what this
        executor computes is refused here. Weights go from their files' pages to the arena: the
        device never holds them twice.

        Raises:
            UnsupportedModelError: the model needs something that is not supported; says what.
            OSError, ValueError: the folder is no model folder (as transformers puts it).
        """
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
        _check_config(config.get_text_config())
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder, config=config, dtype=dtype, local_files_only=True, output_loading_info=True
        )
        module, report = loaded
        _check_complete(folder, report)
        return _plugged_in(module, dtype, arenas, phases or Phases())

    @staticmethod
    def random(
        config: PreTrainedConfig,
        dtype: torch.dtype,
        device: torch.device,
        arenas: Arenas,
        phases: Phases | None = None,
    ) -> Model:
        """A model of that architecture with random weights, always the same; for measuring."""
        _check_config(config.get_text_config())
        torch.manual_seed(0)
        with device:
            module: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype)
        return _plugged_in(module, dtype, arenas, phases or Phases())

    def logits(
        self, token_ids: Tensor, positions: Tensor, last_tokens: Tensor, attention: StepAttention
    ) -> Tensor:
        """One packed forward.

        Args:
            token_ids: ``[tokens]``, the packed input.
            positions: ``[tokens]``, absolute in their sequences.
            last_tokens: ``[rows]``, which of the tokens logits are wanted behind.
            attention: the step's attention.

        Returns:
            ``[rows, vocab_size]`` in the model's dtype.
        """
        return packed_logits(self.module, token_ids, positions, last_tokens, attention)


def resolve_dtype(name: str, device: torch.device, folder: Path) -> torch.dtype:
    """The dtype that option `name` means: ``auto`` is float32 on a CPU, else the checkpoint's own.

    Raises:
        ValueError: no such dtype.
    """
    if name == "auto":
        if device.type == "cpu":
            return torch.float32
        found = AutoConfig.from_pretrained(folder, local_files_only=True).dtype
        return found if isinstance(found, torch.dtype) else torch.bfloat16
    if name not in DTYPES:
        raise ValueError(f"dtype {name!r} is none of: auto, {', '.join(DTYPES)}")
    return DTYPES[name]


def _check_complete(folder: Path, report: dict[str, Any]) -> None:
    """Refuses a checkpoint without all weights: transformers would draw the others at random."""
    missing = sorted(report.get("missing_keys") or ())
    wrong = sorted(str(key) for key in report.get("mismatched_keys") or ())
    if missing or wrong:
        named = ", ".join([*missing, *wrong][:3])
        raise ValueError(
            f"{folder} lacks {len(missing)} of the model's tensors and has {len(wrong)} of another "
            f"shape, such as {named}"
        )


def _check_config(config: Any) -> None:
    """Refuses what shows in the configuration and not in the calls of the attention."""
    kinds = set(getattr(config, "layer_types", None) or ()) - LAYER_KINDS
    rotary = getattr(config, "rope_parameters", None) or {}
    nested = [value for value in rotary.values() if isinstance(value, dict)]
    rotary_kinds = {part.get("rope_type") for part in (rotary, *nested)} & ROTARY_OF_BATCH
    for what, found in (("layers of kind", kinds), ("rotary embeddings of kind", rotary_kinds)):
        if found:
            names = ", ".join(sorted(map(str, found)))
            raise UnsupportedModelError(
                f"model {config.model_type} uses {what} {names}, "
                "which this attention does not support"
            )


def _plugged_in(
    module: PreTrainedModel, dtype: torch.dtype, arenas: Arenas, phases: Phases
) -> Model:
    """Moves the weights to their arena, plugs the attention in, and checks it."""
    name = type(module).__name__
    config = module.config.get_text_config()
    if "logits_to_keep" not in inspect.signature(module.forward).parameters:
        raise UnsupportedModelError(f"model {name} cannot compute logits of chosen tokens alone")
    module.requires_grad_(False).eval()
    weights.fill(module, weights.plan_weights(module), arenas)
    phases.end("weights")
    expected = probe.reference_logits(module, config.vocab_size)
    plug_in(module)
    calls = probe.attention_calls(module, config.num_hidden_layers)
    _check_windows(name, config, calls)
    shape = ModelShape(
        architecture=name,
        vocab_size=expected.shape[-1],
        context_length=config.max_position_embeddings,
        layer_count=config.num_hidden_layers,
        kv_head_count=calls[0].kv_head_count,
        head_dim=calls[0].head_dim,
        dtype=dtype,
    )
    probe.check_equal(module, shape.kv_shape(probe.BLOCK_TOKENS), expected)
    phases.end("model check")
    return Model(module, shape)


def _check_windows(name: str, config: Any, calls: list[probe.AttentionCall]) -> None:
    """A layer that the configuration calls sliding must hand its window to the attention."""
    for layer, kind in enumerate(getattr(config, "layer_types", None) or ()):
        if kind == "sliding_attention" and calls[layer].window is None:
            raise UnsupportedModelError(
                f"model {name} uses a sliding window that only its mask knows (layer {layer}), "
                "which this attention does not support"
            )
