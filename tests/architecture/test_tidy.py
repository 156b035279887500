"""House style that a machine can hold: sizes, words, names, and what product code never does."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from tests.architecture import tree

FILE_LINES_MAX: Final = 400
FUNCTION_LINES_MAX: Final = 60

LONG_FILES: Final[dict[str, int]] = {}
"""Files that are longer, with their length: it may shrink, and then this number with it."""
LONG_FUNCTIONS: Final[dict[str, int]] = {}
"""Functions that are longer, as ``path:name``, likewise."""

FORBIDDEN_WORDS: Final = re.compile(
    r"\b(" + "|".join(["TO" + "DO", "FIX" + "ME", "X" * 3]) + r")\b"
)
FORBIDDEN_STEMS: Final = {"manager", "helper", "helpers", "utils", "util", "common", "base", "misc"}
FORBIDDEN_PREFIXES: Final = ("handle_", "process_")
MUTABLE_CALLS: Final = {"dict", "list", "set", "bytearray", "deque", "defaultdict", "Counter"}

ALL = [pytest.param(path, id=tree.shown(path)) for path in tree.all_sources()]
PRODUCT = [pytest.param(path, id=tree.shown(path)) for path in tree.product_sources()]

Function = ast.FunctionDef | ast.AsyncFunctionDef


def functions(path: Path) -> Iterator[Function]:
    for node in ast.walk(tree.parsed(path)):
        if isinstance(node, Function):
            yield node


def called_name(node: ast.expr) -> str:
    """The last part of what a call calls, or nothing."""
    match node:
        case ast.Call(func=ast.Name(id=name)) | ast.Call(func=ast.Attribute(attr=name)):
            return name
    return ""


@pytest.mark.parametrize("path", ALL)
def test_files_are_short(path: Path) -> None:
    lines = path.read_text().splitlines()
    limit = LONG_FILES.get(tree.shown(path), FILE_LINES_MAX)
    assert len(lines) <= limit


@pytest.mark.parametrize("path", ALL)
def test_functions_are_short(path: Path) -> None:
    long = {}
    for node in functions(path):
        assert node.end_lineno is not None
        size = node.end_lineno - node.lineno + 1
        name = f"{tree.shown(path)}:{node.name}"
        if size > LONG_FUNCTIONS.get(name, FUNCTION_LINES_MAX):
            long[name] = size
    assert long == {}


def test_the_lists_of_long_things_only_shrink() -> None:
    for name, size in LONG_FILES.items():
        assert len((tree.REPOSITORY / name).read_text().splitlines()) == size, name
    sizes = {
        f"{tree.shown(path)}:{node.name}": (node.end_lineno or 0) - node.lineno + 1
        for path in tree.all_sources()
        for node in functions(path)
    }
    for name, size in LONG_FUNCTIONS.items():
        assert sizes[name] == size, name


@pytest.mark.parametrize("path", ALL)
def test_nothing_is_put_off(path: Path) -> None:
    lines = path.read_text().splitlines()
    found = [number for number, line in enumerate(lines, 1) if FORBIDDEN_WORDS.search(line)]
    assert found == []


@pytest.mark.parametrize("path", ALL)
def test_names_say_what_a_thing_is(path: Path) -> None:
    assert path.stem not in FORBIDDEN_STEMS
    broken = []
    for node in ast.walk(tree.parsed(path)):
        if isinstance(node, Function | ast.ClassDef):
            words = set(re.findall(r"[A-Z]?[a-z]+", node.name))
            plain = node.name.lstrip("_")
            lowered = {word.lower() for word in words}
            if plain.startswith(FORBIDDEN_PREFIXES) or lowered & (FORBIDDEN_STEMS - {"base"}):
                broken.append(f"{tree.shown(path, node.lineno)} {node.name}")
    assert broken == []


@pytest.mark.parametrize("path", PRODUCT)
def test_a_module_says_what_it_is(path: Path) -> None:
    if path.name == "__init__.py" and not path.read_text().strip():
        return
    docstring = ast.get_docstring(tree.parsed(path))
    assert docstring, "a module begins with what it owns and who calls it"


@pytest.mark.parametrize("path", ALL)
def test_no_exception_is_swallowed(path: Path) -> None:
    broken = []
    for node in ast.walk(tree.parsed(path)):
        if not isinstance(node, ast.ExceptHandler):
            continue
        silent = all(isinstance(step, ast.Pass) for step in node.body)
        broad = isinstance(node.type, ast.Name) and node.type.id in ("Exception", "BaseException")
        if node.type is None or (silent and broad):
            broken.append(tree.shown(path, node.lineno))
    assert broken == []


@pytest.mark.parametrize("path", PRODUCT)
def test_product_code_never_sleeps_and_never_stubs(path: Path) -> None:
    broken = []
    for node in ast.walk(tree.parsed(path)):
        match node:
            case (
                ast.Attribute(value=ast.Name(id="time"), attr="sleep")
                | ast.ImportFrom(module="time", names=[ast.alias(name="sleep")])
                | ast.Name(id="NotImplementedError")
                | ast.Global()
            ):
                broken.append(f"{tree.shown(path, node.lineno)} {ast.unparse(node)}")
    assert broken == []


@pytest.mark.parametrize("path", PRODUCT)
def test_modules_hold_no_mutable_state(path: Path) -> None:
    """A table in capitals is a constant; any other container on a module is state."""
    broken = []
    for node in tree.parsed(path).body:
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                pass
            case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value):
                pass
            case _:
                continue
        container = isinstance(value, ast.List | ast.Dict | ast.Set | ast.ListComp | ast.DictComp)
        if (container or called_name(value) in MUTABLE_CALLS) and not (
            name.isupper() or name == "__all__"
        ):
            broken.append(f"{tree.shown(path, node.lineno)} {name}")
    assert broken == []


@pytest.mark.parametrize("path", [pytest.param(p, id=tree.shown(p)) for p in tree.sources("tests")])
def test_tests_do_not_sleep(path: Path) -> None:
    broken = [
        tree.shown(path, node.lineno)
        for node in ast.walk(tree.parsed(path))
        if isinstance(node, ast.Attribute)
        and node.attr == "sleep"
        and isinstance(node.value, ast.Name)
        and node.value.id == "time"
    ]
    assert broken == []


def test_rooms_are_flat() -> None:
    nested = [
        path for path in tree.product_sources() if len(path.parts) - len(tree.REPOSITORY.parts) != 2
    ]
    assert nested == []
