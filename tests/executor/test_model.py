"""Loading: what is served gives the right logits, what would not is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from gapless.executor import probe
from gapless.executor.arenas import PlainArenas
from gapless.executor.attention import UnsupportedModelError
from gapless.executor.model import Model, resolve_dtype
from gapless.protos.sampling import Sampling
from gapless.protos.slots import NO_CARRY
from tests.executor.steps import CPU, Row, make_frame, make_runner, seat_words
from tests.models import VOCAB_SIZE, tiny_model_folder

torch.set_num_threads(1)


def load(folder: Path, dtype: torch.dtype = torch.float32) -> Model:
    return Model.load(folder, dtype, CPU, PlainArenas(CPU))


@pytest.mark.parametrize(
    ("model_type", "fields"),
    [
        ("llama", {}),
        ("llama", {"kv_heads": 4, "tie_word_embeddings": True}),
        ("mistral", {"sliding_window": 6}),
        ("qwen2", {}),
        ("qwen3", {}),
        ("gemma3_text", {"sliding_window": 5, "layers": 7}),
        ("granite", {"logits_scaling": 3.0}),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value) or "plain",
)
def test_steps_give_the_logits_of_the_plain_model(
    tmp_path: Path, model_type: str, fields: dict[str, Any]
) -> None:
    """Two sequences in one step, one of them in a chunk whose beginning an earlier step computed:
    longer than a sliding window, over scattered blocks."""
    folder = tiny_model_folder(tmp_path, dtype="float64", model_type=model_type, **fields)
    runner = make_runner(
        folder, dtype=torch.float64, block_count=20, block_tokens=4, row_max=2, block_max=8
    )
    first = [3 + 7 * k % (VOCAB_SIZE - 3) for k in range(25)]
    second = [3 + 11 * k % (VOCAB_SIZE - 3) for k in range(18)]
    greedy = Sampling(temperature=0.0)
    runner.apply_assignments(seat_words(runner.seats.layout, 1, [9, 2, 17, 4, 1, 12, 6], greedy))
    runner.apply_assignments(seat_words(runner.seats.layout, 2, [3, 19, 8, 5, 14], greedy))
    runner.run(runner.stage(make_frame([Row(1, first[:13], 0)])), runner.no_tokens())
    staged = runner.stage(make_frame([Row(2, second, 0), Row(1, first[13:], 13)]))
    with torch.inference_mode():
        found = runner.forward(staged, runner.no_tokens())

    module = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    with torch.inference_mode():
        for row, tokens in enumerate((second, first)):
            expected = module(torch.tensor([tokens])).logits[0, -1]
            torch.testing.assert_close(found[row], expected, rtol=1e-5, atol=1e-5)


def test_a_carried_row_takes_the_token_of_the_step_before(tmp_path: Path) -> None:
    runner = make_runner(
        tiny_model_folder(tmp_path),
        dtype=torch.float32,
        block_count=9,
        block_tokens=4,
        row_max=3,
        block_max=2,
    )
    greedy = Sampling(temperature=0.0)
    for seat in (1, 2, 3):
        runner.apply_assignments(seat_words(runner.seats.layout, seat, [2 * seat], greedy))
    previous = torch.tensor([50, 60, 70], dtype=torch.int32)

    def logits(*rows: tuple[int, int, int]) -> torch.Tensor:
        frame = make_frame([Row(seat, [token], 0, carry) for seat, token, carry in rows])
        with torch.inference_mode():
            return runner.forward(runner.stage(frame), previous)

    carried = logits((1, 0, 2), (2, 60, NO_CARRY), (3, 0, 0))
    literal = logits((1, 70, NO_CARRY), (2, 60, NO_CARRY), (3, 50, NO_CARRY))
    assert torch.equal(carried, literal)
    assert not torch.equal(carried, logits((1, 50, NO_CARRY), (2, 60, NO_CARRY), (3, 70, -1)))


def test_the_shape_is_that_of_the_model(tmp_path: Path) -> None:
    folder = tiny_model_folder(tmp_path, layers=3, heads=6, kv_heads=2, head_dim=10)
    shape = load(folder).shape
    assert shape.architecture == "LlamaForCausalLM"
    assert (shape.layer_count, shape.kv_head_count, shape.head_dim) == (3, 2, 10)
    assert (shape.vocab_size, shape.context_length) == (VOCAB_SIZE, 512)
    assert shape.dtype_name == "float32"
    assert shape.kv_shape(16).block_bytes == 2 * 3 * 16 * 2 * 10 * 4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_every_dtype_passes_its_own_check(tmp_path: Path, dtype: torch.dtype) -> None:
    assert load(tiny_model_folder(tmp_path), dtype).shape.dtype == dtype


@pytest.mark.parametrize(
    ("model_type", "fields", "reason"),
    [
        ("gemma2", {}, "uses softcap, which this attention does not support"),
        ("gpt_oss", {}, "uses s_aux, which"),
        ("bloom", {}, "has 2 layers, of which 0 use the plugged-in attention"),
        ("llama4_text", {}, "uses layers of kind chunked_attention, which"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
            "uses rotary embeddings of kind dynamic, which",
        ),
    ],
    ids=["soft-cap", "sinks", "own attention", "chunked", "rotary of the batch"],
)
def test_what_would_be_computed_wrongly_is_refused(
    tmp_path: Path, model_type: str, fields: dict[str, Any], reason: str
) -> None:
    folder = tiny_model_folder(tmp_path, model_type=model_type, **fields)
    with pytest.raises(UnsupportedModelError, match=reason):
        load(folder)


def test_a_model_that_computes_something_else_is_refused(tmp_path: Path) -> None:
    folder = tiny_model_folder(tmp_path)
    module: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder)
    expected = probe.reference_logits(module, VOCAB_SIZE)
    with torch.no_grad():
        module.get_parameter("model.layers.1.self_attn.o_proj.weight").mul_(1.1)
    loaded = load(folder)
    probe.check_equal(loaded.module, loaded.shape.kv_shape(4), expected)
    changed = probe.reference_logits(module, VOCAB_SIZE)
    with pytest.raises(UnsupportedModelError, match="computes something else"):
        probe.check_equal(loaded.module, loaded.shape.kv_shape(4), changed)


def test_dtype_names(tmp_path: Path) -> None:
    folder = tiny_model_folder(tmp_path, dtype="float64")
    assert resolve_dtype("auto", CPU, folder) == torch.float32
    assert resolve_dtype("auto", torch.device("cuda"), folder) == torch.float64
    assert resolve_dtype("bfloat16", CPU, folder) == torch.bfloat16
    with pytest.raises(ValueError, match="dtype 'int8' is none of: auto, float32"):
        resolve_dtype("int8", CPU, folder)
