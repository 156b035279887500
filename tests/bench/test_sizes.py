"""What a benchmark believes about models, against what the executor says of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from gapless.bench.sizes import PRESET_PREFIX, SHAPES, ModelError, Shape, find_model
from gapless.protos import model_folder
from tests.models import VOCAB_SIZE, tiny_model_folder


def test_presets_are_those_of_the_executor() -> None:
    from gapless.executor import presets

    assert PRESET_PREFIX == presets.PREFIX
    assert set(SHAPES) == set(presets.PRESETS)
    for name, shape in SHAPES.items():
        config = presets.preset_config(name)
        assert shape == Shape(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            layers=config.num_hidden_layers,
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
        )


@pytest.mark.parametrize("name", ["llama-8b", "llama-1b"])
def test_weights_are_counted_as_the_model_has_them(name: str) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    from gapless.executor import presets

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            presets.preset_config(name)
        )
    embedding = model.get_input_embeddings().weight
    body = sum(each.numel() for each in model.model.parameters() if each is not embedding)
    head = model.get_output_embeddings().weight  # the embedding once more, where they are tied
    assert SHAPES[name].weights_read == body + head.numel()


def test_keys_and_values_are_counted() -> None:
    assert 2 * SHAPES["llama-8b"].kv_values == 128 * 1024
    assert 2 * SHAPES["llama-1b"].kv_values == 32 * 1024


def test_a_folder_says_its_revision_and_vocabulary(tmp_path: Path) -> None:
    folder = tiny_model_folder(tmp_path / "tiny")
    model = find_model(str(folder))
    assert (model.name, model.vocab_size, model.shape) == ("tiny", VOCAB_SIZE, None)
    assert model.source == str(folder)
    assert model.revision == model_folder.revision(folder)


@pytest.mark.parametrize("text", ["preset:none", "/no/such/folder"])
def test_what_is_no_model_is_refused(text: str) -> None:
    with pytest.raises(ModelError):
        find_model(text)
