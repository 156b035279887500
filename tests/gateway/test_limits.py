"""Every limit of a field stands in the public proto file, where callers look for it."""

from __future__ import annotations

import re
from types import ModuleType

import pytest

from gapless.gateway import parameters, prompts, validation
from tests.architecture import tree

PROTO = (tree.REPOSITORY / "protos" / "inference.proto").read_text()


def limits(module: ModuleType) -> dict[str, float]:
    """The constants of a module that bound something."""
    return {
        name: value
        for name, value in vars(module).items()
        if re.search(r"_(MAX|MIN)\b|_(MAX|MIN)_", name)
    }


def spellings(name: str, value: float) -> set[str]:
    """How a comment may say it."""
    number = f"{value:g}" if value < 1e5 else str(int(value))
    if name.endswith("_S"):
        return {f"{value:g}s", f"{value / 3600:g}h"}
    return {number, f"{value / 1024:g} KiB"}


@pytest.mark.parametrize("module", [validation, prompts, parameters])
def test_limits_of_fields_are_documented(module: ModuleType) -> None:
    found = limits(module)
    assert len(found) > 5
    missing = [
        name
        for name, value in found.items()
        if not any(
            re.search(rf"(?<![\w.]){re.escape(each)}\b", PROTO.replace("..", " "))
            for each in spellings(name, value)
        )
    ]
    assert missing == []
