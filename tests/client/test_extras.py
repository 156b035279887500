"""A command whose packages are not installed says which, and what brings them."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from gapless.client import extras

PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"
DISTRIBUTIONS = {"zmq": "pyzmq", "grpc_reflection": "grpcio-reflection"}
"""Of packages that are called otherwise."""


def test_what_is_missing_is_named() -> None:
    said = extras.lacking("serve", ("json", "no_such_package"))
    assert said == "not installed: no_such_package (pip install 'gapless[serve]' brings them)"
    assert extras.lacking("serve", ("json",)) is None


@pytest.mark.parametrize(
    ("packages", "brought_by"),
    [
        (extras.BENCH, ("scheduler", "executor")),
        (extras.SERVE, ("gateway", "scheduler", "executor")),
    ],
)
def test_the_extra_brings_what_is_named(
    packages: tuple[str, ...], brought_by: tuple[str, ...]
) -> None:
    project = tomllib.loads(PYPROJECT.read_text())["project"]
    brought = " ".join(
        line for extra in brought_by for line in project["optional-dependencies"][extra]
    )
    assert [name for name in packages if DISTRIBUTIONS.get(name, name) not in brought] == []
    assert extras.lacking("any", packages) is None
