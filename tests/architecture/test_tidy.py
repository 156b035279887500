"""House style that a machine can hold: sizes, words, names, and what product code never does."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

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

Function = ast.FunctionDef | ast.AsyncFunctionDef


def functions(path: Path) -> Iterator[Function]:
    for node in ast.walk(tree.parsed(path)):
        if isinstance(node, Function):
            yield node


def nodes(paths: Iterable[Path]) -> Iterator[tuple[Path, ast.AST]]:
    for path in paths:
        for node in ast.walk(tree.parsed(path)):
            yield path, node


def called_name(node: ast.expr) -> str:
    """The last part of what a call calls, or nothing."""
    match node:
        case ast.Call(func=ast.Name(id=name)) | ast.Call(func=ast.Attribute(attr=name)):
            return name
    return ""


def test_files_are_short() -> None:
    long = {
        tree.shown(path): size
        for path in tree.all_sources()
        if (size := len(path.read_text().splitlines()))
        > LONG_FILES.get(tree.shown(path), FILE_LINES_MAX)
    }
    assert long == {}


def function_sizes() -> dict[str, int]:
    return {
        f"{tree.shown(path)}:{node.name}": (node.end_lineno or 0) - node.lineno + 1
        for path in tree.all_sources()
        for node in functions(path)
    }


def test_functions_are_short() -> None:
    long = {
        name: size
        for name, size in function_sizes().items()
        if size > LONG_FUNCTIONS.get(name, FUNCTION_LINES_MAX)
    }
    assert long == {}


def test_the_lists_of_long_things_only_shrink() -> None:
    for name, size in LONG_FILES.items():
        assert len((tree.REPOSITORY / name).read_text().splitlines()) == size, name
    sizes = function_sizes()
    for name, size in LONG_FUNCTIONS.items():
        assert sizes[name] == size, name


def test_nothing_is_put_off() -> None:
    found = [
        tree.shown(path, number)
        for path in tree.all_sources()
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if FORBIDDEN_WORDS.search(line)
    ]
    assert found == []


def test_names_say_what_a_thing_is() -> None:
    broken = [tree.shown(path) for path in tree.all_sources() if path.stem in FORBIDDEN_STEMS]
    for path, node in nodes(tree.all_sources()):
        if isinstance(node, Function | ast.ClassDef):
            words = {word.lower() for word in re.findall(r"[A-Z]?[a-z]+", node.name)}
            plain = node.name.lstrip("_")
            if plain.startswith(FORBIDDEN_PREFIXES) or words & (FORBIDDEN_STEMS - {"base"}):
                broken.append(f"{tree.shown(path, node.lineno)} {node.name}")
    assert broken == []


def test_a_module_says_what_it_is() -> None:
    """A docstring opens each: what it owns, what it must not know, who calls it."""
    broken = [
        tree.shown(path)
        for path in tree.product_sources()
        if path.read_text().strip() and not ast.get_docstring(tree.parsed(path))
    ]
    assert broken == []


def test_no_exception_is_swallowed() -> None:
    broken = []
    for path, node in nodes(tree.all_sources()):
        if not isinstance(node, ast.ExceptHandler):
            continue
        silent = all(isinstance(step, ast.Pass) for step in node.body)
        broad = isinstance(node.type, ast.Name) and node.type.id in ("Exception", "BaseException")
        if node.type is None or (silent and broad):
            broken.append(tree.shown(path, node.lineno))
    assert broken == []


def test_product_code_never_sleeps_and_never_stubs() -> None:
    broken = []
    for path, node in nodes(tree.product_sources()):
        match node:
            case (
                ast.Attribute(value=ast.Name(id="time"), attr="sleep")
                | ast.ImportFrom(module="time", names=[ast.alias(name="sleep")])
                | ast.Name(id="NotImplementedError")
                | ast.Global()
            ):
                broken.append(f"{tree.shown(path, node.lineno)} {ast.unparse(node)}")
    assert broken == []


def test_tests_do_not_sleep() -> None:
    broken = []
    for path, node in nodes(tree.sources("tests")):
        match node:
            case ast.Attribute(value=ast.Name(id="time"), attr="sleep"):
                broken.append(tree.shown(path, node.lineno))
    assert broken == []


def test_modules_hold_no_mutable_state() -> None:
    """A table in capitals is a constant; any other container on a module is state."""
    broken = []
    for path in tree.product_sources():
        for node in tree.parsed(path).body:
            match node:
                case ast.Assign(targets=[ast.Name(id=name)], value=value):
                    pass
                case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value):
                    pass
                case _:
                    continue
            display = ast.List | ast.Dict | ast.Set | ast.ListComp | ast.DictComp | ast.SetComp
            container = isinstance(value, display) or called_name(value) in MUTABLE_CALLS
            if container and not (name.isupper() or name == "__all__"):
                broken.append(f"{tree.shown(path, node.lineno)} {name}")
    assert broken == []


def test_rooms_are_flat() -> None:
    depth = len(tree.REPOSITORY.parts) + 2
    nested = [tree.shown(path) for path in tree.product_sources() if len(path.parts) != depth]
    assert nested == []
