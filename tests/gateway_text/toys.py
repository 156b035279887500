"""Small ``tokenizer.json`` contents of the kinds that published models have."""

from __future__ import annotations

from typing import Any

CONTROL = ("<unk>", "<s>", "</s>")
"""Special tokens of the SentencePiece-like toys: ids 0, 1, 2."""

_WORDS = (
    "▁",
    "▁hello",
    "▁world",
    "he",
    "ll",
    "o",
    "▁w",
    "or",
    "ld",
    "안",
    "a",
    "b",
    "c",
    "\n",
    "<",
)


def added(token: int, content: str, *, special: bool = True, **flags: bool) -> dict[str, Any]:
    """An entry of `added_tokens`."""
    return {
        "id": token,
        "content": content,
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": special,
        **flags,
    }


def byte_level(
    added_tokens: list[dict[str, Any]], *, add_prefix_space: bool = False, **top: Any
) -> dict[str, Any]:
    """Byte-level BPE: ids 0..255 are the bytes, then a few merges, then `added_tokens`."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    character = {byte: chr(byte) for byte in printable}
    character.update({byte: chr(0x100 + index) for index, byte in enumerate(others)})
    vocabulary = {character[byte]: byte for byte in range(256)}
    merges = [("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("Ġ", "hello"), ("i", "n")]
    for left, right in merges:
        vocabulary[left + right] = len(vocabulary)
    options = {"add_prefix_space": add_prefix_space, "trim_offsets": True, "use_regex": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added_tokens,
        "normalizer": None,
        "pre_tokenizer": {"type": "ByteLevel", **options},
        "post_processor": None,
        "decoder": {"type": "ByteLevel", **options},
        "model": _bpe(vocabulary, merges, byte_fallback=False, unk_token=None),
        **top,
    }


def sentencepiece(style: str, *, byte_fallback: bool = True, **top: Any) -> dict[str, Any]:
    """SentencePiece-like: "llama" (blank in front of every part), "mistral" (of the first part),
    "gemma" (no blank in front), "unigram" (Metaspace decoder)."""
    vocabulary = {token: index for index, token in enumerate(CONTROL)}
    if byte_fallback:
        for byte in range(256):
            vocabulary[f"<0x{byte:02X}>"] = len(vocabulary)
    for word in _WORDS:
        vocabulary[word] = len(vocabulary)
    for letter in "helowrd":
        vocabulary.setdefault(letter, len(vocabulary))
    merges = [("h", "e"), ("l", "l"), ("▁", "w"), ("o", "r"), ("l", "d")]
    to_blank = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
    from_blank = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    strip = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
    decoders: list[dict[str, Any]] = [to_blank, {"type": "ByteFallback"}, {"type": "Fuse"}]
    metaspace = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": False}
    normalizer: dict[str, Any] | None = None
    pre_tokenizer: dict[str, Any] | None = None
    decoder: dict[str, Any] = {"type": "Sequence", "decoders": [*decoders, strip]}
    model = _bpe(vocabulary, merges, byte_fallback=byte_fallback, unk_token="<unk>")
    match style:
        case "llama":
            prepend = {"type": "Prepend", "prepend": "▁"}
            normalizer = {"type": "Sequence", "normalizers": [prepend, from_blank]}
        case "mistral":
            pre_tokenizer = metaspace
        case "gemma":
            normalizer = from_blank
            decoder = {"type": "Sequence", "decoders": decoders}
        case "unigram":
            pre_tokenizer = metaspace
            decoder = {"type": "Sequence", "decoders": [{"type": "ByteFallback"}, metaspace]}
            entries = [[word, -float(1 + index)] for index, word in enumerate(vocabulary)]
            model = {
                "type": "Unigram",
                "unk_id": 0,
                "vocab": entries,
                "byte_fallback": byte_fallback,
            }
        case _:
            raise AssertionError(style)
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [added(index, token) for index, token in enumerate(CONTROL)],
        "normalizer": normalizer,
        "pre_tokenizer": pre_tokenizer,
        "post_processor": bos_in_front("<s>", 1),
        "decoder": decoder,
        "model": model,
        **top,
    }


def word_piece() -> dict[str, Any]:
    """A tokenizer whose tokens have no bytes of their own."""
    return {
        "version": "1.0",
        "added_tokens": [added(0, "[UNK]")],
        "normalizer": None,
        "pre_tokenizer": {"type": "Whitespace"},
        "post_processor": None,
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True},
        "model": {
            "type": "WordPiece",
            "unk_token": "[UNK]",
            "continuing_subword_prefix": "##",
            "max_input_chars_per_word": 100,
            "vocab": {"[UNK]": 0, "a": 1, "##b": 2},
        },
    }


def bos_in_front(spelling: str, token: int) -> dict[str, Any]:
    """A post-processor that adds one token in front."""
    return {
        "type": "TemplateProcessing",
        "single": [
            {"SpecialToken": {"id": spelling, "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}},
        ],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {spelling: {"id": spelling, "ids": [token], "tokens": [spelling]}},
    }


def _bpe(
    vocabulary: dict[str, int],
    merges: list[tuple[str, str]],
    *,
    byte_fallback: bool,
    unk_token: str | None,
) -> dict[str, Any]:
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": unk_token,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": unk_token is not None,
        "byte_fallback": byte_fallback,
        "ignore_merges": False,
        "vocab": vocabulary,
        "merges": [list(merge) for merge in merges],
    }
