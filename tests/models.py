"""Small model folders for tests: a random tiny Llama, and the prepared demo model.

`tiny_model_folder` is complete (weights, tokenizer, chat template, generation config), so every
process of the server can start on it. Imports torch late: tests of processes without it may import
this module.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, Final

SPECIAL_TOKENS: Final = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
"""Ids 0, 1, 2."""
BYTE_TOKENS_AT: Final = len(SPECIAL_TOKENS)
"""Id of the token of byte 0; all 256 follow in order."""
MERGES: Final = (
    ("t", "h"),
    ("th", "e"),
    ("i", "n"),
    ("a", "n"),
    ("an", "d"),
    ("Ġ", "the"),
    ("Ġ", "and"),
    ("e", "r"),
    ("o", "u"),
    ("Ġ", "a"),
    ("in", "g"),
    ("r", "e"),
    ("s", "t"),
    ("Ġ", "s"),
    ("l", "l"),
    ("h", "e"),
    ("he", "ll"),
    ("hell", "o"),
    ("Ġ", "w"),
)
VOCAB_SIZE: Final = BYTE_TOKENS_AT + 256 + len(MERGES)
END_TOKEN: Final = SPECIAL_TOKENS.index("<|im_end|>")

CHAT_TEMPLATE: Final = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def tiny_model_folder(
    path: Path,
    *,
    dtype: str = "float32",
    layers: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 16,
    context_length: int = 512,
    seed: int = 0,
    model_type: str = "llama",
    **config_fields: Any,
) -> Path:
    """Writes a random model of a few hundred kB and returns `path`.

    Args:
        path: the folder, created if need be.
        dtype: of the stored weights, "float32" or "float64".
        layers, heads, kv_heads, head_dim, context_length: its shape.
        seed: of the random weights.
        model_type: any decoder of transformers with Llama's configuration fields.
        config_fields: further fields of its configuration.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    path.mkdir(parents=True, exist_ok=True)
    config = AutoConfig.for_model(
        model_type,
        vocab_size=VOCAB_SIZE,
        hidden_size=heads * head_dim,
        intermediate_size=2 * heads * head_dim,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=context_length,
        bos_token_id=0,
        eos_token_id=END_TOKEN,
        pad_token_id=0,
        **config_fields,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            config, dtype=getattr(torch, dtype)
        )
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim > 1:  # wide enough for tokens that vary with their context
                    parameter.normal_(std=0.5 * parameter.shape[-1] ** -0.5)
    model.generation_config.eos_token_id = [END_TOKEN, 0]
    model.save_pretrained(path)
    write_tokenizer(path)
    return path


def demo_model_folder() -> Path:
    """The prepared folder of the demo model, made once in the cache ($GAPLESS_CACHE).

    Needs the network the first time, like `make demo` does; without one, $GAPLESS_DEMO_MODEL names
    its GGUF file or folder.
    """
    from gapless.executor.prepare import DEMO, model_folder

    return model_folder(os.environ.get("GAPLESS_DEMO_MODEL", DEMO))


def write_tokenizer(path: Path) -> None:
    """Writes the tiny model's tokenizer files and chat template into a folder that exists."""
    alphabet = _byte_alphabet()
    vocabulary = {token: index for index, token in enumerate(SPECIAL_TOKENS)}
    for byte in range(256):
        vocabulary[alphabet[byte]] = BYTE_TOKENS_AT + byte
    for left, right in MERGES:
        vocabulary[left + right] = len(vocabulary)
    assert len(vocabulary) == VOCAB_SIZE, len(vocabulary)
    byte_level = {"add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": index,
                "content": token,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
            for index, token in enumerate(SPECIAL_TOKENS)
        ],
        "normalizer": None,
        "pre_tokenizer": {"type": "ByteLevel", **byte_level},
        "post_processor": None,
        "decoder": {"type": "ByteLevel", **byte_level},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": vocabulary,
            "merges": [list(merge) for merge in MERGES],
        },
    }
    _write_json(path / "tokenizer.json", tokenizer)
    _write_json(
        path / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<|endoftext|>",
            "eos_token": "<|im_end|>",
            "pad_token": "<|endoftext|>",
            "clean_up_tokenization_spaces": False,
            "chat_template": CHAT_TEMPLATE,
        },
    )
    (path / "chat_template.jinja").write_text(CHAT_TEMPLATE)


def _byte_alphabet() -> list[str]:
    """The printable stand-in of each byte in byte-level tokenizers (as GPT-2 defined them)."""
    printable = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    alphabet = []
    substitute = 0x100
    for byte in range(256):
        if byte in printable:
            alphabet.append(chr(byte))
        else:
            alphabet.append(chr(substitute))
            substitute += 1
    return alphabet


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False, indent=1))
