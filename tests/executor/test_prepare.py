"""What `prepare` makes of a model's name: a model folder, or one clear line."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt
import pytest
from safetensors.numpy import load_file
from tokenizers import Tokenizer

from gapless.executor import demo_model, prepare
from gapless.executor.config import UserError
from gapless.executor.model_cache import default_cache
from gapless.protos.model_folder import missing_files, revision

Floats = npt.NDArray[np.float32]

WIDTH = 32
VOCABULARY = ["<|endoftext|>", "<|im_end|>", *"abcdefghijklmnopqrstuvwxyz", "ab", "cd", "Ġ", "Ċ"]
CHAT_TEMPLATE = "{{ messages[0]['content'] }}<|im_end|>"


def write_tiny_gguf(path: Path) -> dict[str, Floats]:
    """A one-layer Llama; returns the (dequantised) weights under transformers' names."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(1)
    writer.add_feed_forward_length(WIDTH)
    writer.add_head_count(1)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(WIDTH)
    writer.add_vocab_size(len(VOCABULARY))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(VOCABULARY)
    writer.add_token_types([3, 3] + [1] * (len(VOCABULARY) - 2))
    writer.add_token_merges(["a b", "c d"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    writer.add_chat_template(CHAT_TEMPLATE)
    expected = {}
    random = np.random.default_rng(0)

    def add(name: str, theirs: str, *shape: int) -> None:
        weights = random.normal(size=shape).astype(np.float32)
        kind = gguf.GGMLQuantizationType.F32 if len(shape) == 1 else gguf.GGMLQuantizationType.Q8_0
        packed = gguf.quants.quantize(weights, kind)
        writer.add_tensor(name, packed, raw_dtype=kind)
        expected[theirs] = gguf.quants.dequantize(packed, kind)

    add("token_embd.weight", "model.embed_tokens.weight", len(VOCABULARY), WIDTH)
    add("output.weight", "lm_head.weight", len(VOCABULARY), WIDTH)
    add("output_norm.weight", "model.norm.weight", WIDTH)
    layer = "model.layers.0"
    add("blk.0.attn_norm.weight", f"{layer}.input_layernorm.weight", WIDTH)
    add("blk.0.ffn_norm.weight", f"{layer}.post_attention_layernorm.weight", WIDTH)
    for name in ("q", "k", "v"):
        add(f"blk.0.attn_{name}.weight", f"{layer}.self_attn.{name}_proj.weight", WIDTH, WIDTH)
    add("blk.0.attn_output.weight", f"{layer}.self_attn.o_proj.weight", WIDTH, WIDTH)
    for name in ("gate", "up", "down"):
        add(f"blk.0.ffn_{name}.weight", f"{layer}.mlp.{name}_proj.weight", WIDTH, WIDTH)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return expected


def test_a_gguf_file_becomes_a_model_folder_once(tmp_path: Path) -> None:
    source = tmp_path / "tiny"
    source.mkdir()
    expected = write_tiny_gguf(source / "tiny.gguf")
    cache = tmp_path / "cache"

    folder = prepare.model_folder(str(source), cache)

    assert missing_files(folder) == ()
    found = load_file(folder / "model.safetensors")
    assert found.keys() == expected.keys()
    for name, weights in expected.items():
        assert found[name].dtype == np.float32
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            # GGUF interleaves the two halves of each head for its rotary embedding.
            weights = weights.reshape(-1, 2, WIDTH).swapaxes(0, 1).reshape(-1, WIDTH)
        np.testing.assert_array_equal(found[name], weights, err_msg=name)
    # What the sources say of end tokens is kept as it is, for the gateway to unite.
    assert json.loads((folder / "config.json").read_text())["eos_token_id"] == 0
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == 0
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    assert settings["eos_token"] == "<|endoftext|>"
    assert (folder / "chat_template.jinja").read_text() == CHAT_TEMPLATE

    stamps = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    named = tmp_path / "the same file of another name.gguf"
    (source / "tiny.gguf").rename(named)
    assert prepare.model_folder(str(named), cache) == folder
    assert {path: path.stat().st_mtime_ns for path in folder.iterdir()} == stamps


def test_a_model_folder_is_returned_as_it_is(tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer.json", "model.safetensors", "ignored.gguf"):
        (tmp_path / name).touch()
    cache = tmp_path / "cache"
    assert prepare.model_folder(str(tmp_path), cache) == tmp_path
    assert not cache.exists()


def test_of_a_preset_only_what_a_gateway_reads_is_made(tmp_path: Path) -> None:
    folder = prepare.model_folder("preset:tiny", tmp_path)
    assert prepare.model_folder("preset:tiny", tmp_path) == folder
    assert missing_files(folder) == ("*.safetensors",)
    assert revision(folder) == "preset:tiny"
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert (
        tokenizer.get_vocab_size() == json.loads((folder / "config.json").read_text())["vocab_size"]
    )
    assert tokenizer.decode(tokenizer.encode("some tëxt").ids) == "some tëxt"
    assert tokenizer.decode([300, 1023]) == " 300 1023"


def test_what_is_no_model_is_refused_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    empty, several, wrong = tmp_path / "empty", tmp_path / "several", tmp_path / "wrong.gguf"
    empty.mkdir()
    several.mkdir()
    (several / "b.gguf").touch()
    (several / "a.gguf").touch()
    wrong.write_bytes(b"PK")
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF" + bytes(40))
    for model, complaint in {
        str(tmp_path / "nowhere"): "no such file or folder",
        str(empty): "missing: config.json, tokenizer.json, *.safetensors) and has no GGUF file",
        str(several): "name one of them: a.gguf, b.gguf",
        str(wrong): "is not a GGUF file",
        str(broken): "cannot convert",
        "preset:none": "no such preset",
        "nobody/nothing": "the Hugging Face hub gave nothing of that name",
    }.items():
        assert prepare.main([model, "--cache", str(tmp_path / "cache")]) == 2
        written = capsys.readouterr()
        last = written.err.strip().splitlines()[-1]
        assert last.startswith("prepare: ")
        assert complaint in last
        assert written.out == ""
    assert not list((tmp_path / "cache" / "models").glob("*[!k]"))


def test_a_demo_model_that_cannot_be_fetched_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    with pytest.raises(UserError, match="cannot fetch the demo model with pip: ERROR: No matching"):
        prepare.model_folder("demo", tmp_path)


@pytest.mark.model
def test_the_demo_model_is_a_model_folder(capsys: pytest.CaptureFixture[str]) -> None:
    assert prepare.main(["demo"]) == 0
    folder = Path(capsys.readouterr().out.splitlines()[-1])
    assert missing_files(folder) == ()
    assert len(revision(folder)) == 16
    assert prepare.model_folder("demo") == folder

    file = gguf.GGUFReader(demo_model.demo_gguf(default_cache()))
    found = load_file(folder / "model.safetensors")
    packed = {tensor.name: tensor for tensor in file.tensors}
    for name, theirs in {
        "token_embd.weight": "model.embed_tokens.weight",
        "blk.0.ffn_down.weight": "model.layers.0.mlp.down_proj.weight",
        "blk.29.attn_v.weight": "model.layers.29.self_attn.v_proj.weight",
    }.items():
        weights = gguf.quants.dequantize(packed[name].data, packed[name].tensor_type)
        np.testing.assert_array_equal(found[theirs], weights, err_msg=name)
    assert "<|im_end|>" in (folder / "chat_template.jinja").read_text()
