"""The demo model's tokenizer and chat template, loaded once."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer

from gapless.gateway.templates import ChatTemplate
from gapless.gateway.tokenizer import TextTokenizer
from tests.models import demo_model_folder


@pytest.fixture(scope="session")
def demo_folder() -> Path:
    return demo_model_folder()


@pytest.fixture(scope="session")
def demo_tokenizer(demo_folder: Path) -> TextTokenizer:
    return TextTokenizer.load(demo_folder)


@pytest.fixture(scope="session")
def demo_template(demo_folder: Path, demo_tokenizer: TextTokenizer) -> ChatTemplate:
    template = ChatTemplate.load(demo_folder, demo_tokenizer.control_tokens)
    assert template is not None
    return template


@pytest.fixture(scope="session")
def demo_decoder(demo_folder: Path) -> Tokenizer:
    """Their own tokenizer, to compare with."""
    return Tokenizer.from_file(str(demo_folder / "tokenizer.json"))
