"""End tokens: the union of what the files and the chat template say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gapless.gateway.end_tokens import read_end_tokens, turn_end
from gapless.gateway.templates import ChatTemplate
from gapless.gateway.tokenizer import TextTokenizer
from tests.gateway_text import toys

TEXT_END, TURN, TURN_END = 262, 263, 264
SPELLINGS = {TEXT_END: "<|text_end|>", TURN: "<|turn|>", TURN_END: "<|turn_end|>"}

CHATML = "{% for m in messages %}<|turn|>{{ m.role }}\n{{ m.content }}<|turn_end|>\n{% endfor %}"


def read(path: Path, template: str | None, **files: dict[str, Any]) -> tuple[int, ...]:
    """The end tokens of a synthetic model folder."""
    added = [toys.added(token, spelling) for token, spelling in SPELLINGS.items()]
    (path / "tokenizer.json").write_text(json.dumps(toys.byte_level(added)))
    files.setdefault("config", {})
    for name, content in files.items():
        (path / f"{name}.json").write_text(json.dumps(content))
    if template is not None:
        (path / "chat_template.jinja").write_text(template)
    tokenizer = TextTokenizer.load(path)
    chat_template = ChatTemplate.load(path, tokenizer.control_tokens)
    return read_end_tokens(path, tokenizer, chat_template)


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, ()),
        ({"generation_config": {"eos_token_id": TEXT_END}}, (TEXT_END,)),
        ({"generation_config": {"eos_token_id": [TURN_END, TEXT_END]}}, (TEXT_END, TURN_END)),
        ({"config": {"eos_token_id": TEXT_END}}, (TEXT_END,)),
        ({"config": {"eos_token_id": None}}, ()),
        ({"config": {"text_config": {"eos_token_id": [TURN_END]}}}, (TURN_END,)),
        ({"tokenizer_config": {"eos_token": "<|turn_end|>"}}, (TURN_END,)),
        ({"tokenizer_config": {"eos_token": {"content": "<|text_end|>"}}}, (TEXT_END,)),
        ({"tokenizer_config": {"eos_token": "<|unknown|>"}}, ()),
        ({"config": {"eos_token_id": 10_000}}, ()),  # beyond the vocabulary
        (
            {
                "generation_config": {"eos_token_id": TEXT_END},
                "config": {"eos_token_id": TURN},
                "tokenizer_config": {"eos_token": "<|turn_end|>"},
            },
            (TEXT_END, TURN, TURN_END),
        ),
    ],
)
def test_files(tmp_path: Path, files: dict[str, dict[str, Any]], expected: tuple[int, ...]) -> None:
    assert read(tmp_path, None, **files) == expected


def test_the_template_corrects_files_that_name_a_wrong_token(tmp_path: Path) -> None:
    files: dict[str, dict[str, Any]] = {
        "generation_config": {"eos_token_id": TEXT_END},
        "config": {"eos_token_id": TEXT_END},
        "tokenizer_config": {"eos_token": "<|text_end|>"},
    }
    assert read(tmp_path, CHATML, **files) == (TEXT_END, TURN_END)


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (CHATML, (TURN_END,)),
        # A blank in front of the token, as Llama 2 has it.
        ("{% for m in messages %}{{ m.content }} <|turn_end|>{% endfor %}", (TURN_END,)),
        # The next turn's mark ends a turn where nothing else does.
        ("{% for m in messages %}<|turn|>{{ m.content }}{% endfor %}", (TURN,)),
        # The last turn stays open.
        (
            "{% for m in messages %}{{ m.content }}{% if not loop.last %}<|turn_end|>"
            "{% endif %}{% endfor %}",
            (TURN_END,),
        ),
        # A chat must not end with a user.
        (
            "{% if messages[-1].role == 'user' %}{{ raise_exception('no') }}{% endif %}"
            "{% for m in messages %}{{ m.content }}<|turn_end|>{% endfor %}",
            (TURN_END,),
        ),
        # Only the last message is rendered, or none, or the template is broken.
        ("{{ messages[-1].content }}<|turn_end|>", (TURN_END,)),
        ("<|turn|>", ()),
        ("{{ raise_exception('never') }}", ()),
        # Plain text between turns.
        ("{% for m in messages %}{{ m.content }}\nNext: <|turn|>{% endfor %}", ()),
    ],
)
def test_templates(tmp_path: Path, template: str, expected: tuple[int, ...]) -> None:
    assert read(tmp_path, template) == expected


@pytest.mark.model
def test_the_demo_model_ends_a_turn(
    demo_folder: Path, demo_tokenizer: TextTokenizer, demo_template: ChatTemplate
) -> None:
    assert demo_tokenizer.token_of("<|im_end|>") == 2
    assert turn_end(demo_tokenizer, demo_template) == 2
    assert 2 in read_end_tokens(demo_folder, demo_tokenizer, demo_template)
