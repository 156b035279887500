"""What the pages say of files is true."""

from __future__ import annotations

import re
from typing import Final

import pytest

from tests.architecture import tree

NAMED: Final = re.compile(r"`((?:[\w.]+/)*\w+\.(?:py|proto|sh|yml))`")
LINKED: Final = re.compile(r"\]\((?!https?:)([^)#]+)\)")


@pytest.mark.parametrize("page", ["ARCHITECTURE.md", "README.md"])
def test_files_that_a_page_names_are_there(page: str) -> None:
    """By their path, or by their name in one of the rooms."""
    text = (tree.REPOSITORY / page).read_text()
    named = {*NAMED.findall(text), *LINKED.findall(text)}
    assert named
    places = (tree.REPOSITORY, *(tree.REPOSITORY / room for room in tree.ROOMS))
    missing = [name for name in named if not any((place / name).exists() for place in places)]
    assert missing == []
