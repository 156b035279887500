"""Private messages: every word of every conversation survives the wire, and nothing else does."""

from __future__ import annotations

import typing
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import inspect

from gapless.protos import messages
from gapless.protos.messages import (
    ExecutorWord,
    GatewayWord,
    SchedulerUpdate,
    SchedulerWord,
)

UNIONS = {
    "GatewayWord": GatewayWord,
    "SchedulerUpdate": SchedulerUpdate,
    "ExecutorWord": ExecutorWord,
    "SchedulerWord": SchedulerWord,
}
MEMBERS = [(name, member) for name, union in UNIONS.items() for member in typing.get_args(union)]


def values(kind: inspect.Type) -> st.SearchStrategy[Any]:
    """Any value of a type that messages use."""
    match kind:
        case inspect.BoolType():
            return st.booleans()
        case inspect.IntType():
            return st.integers(-(2**63), 2**64 - 1)
        case inspect.FloatType():
            return st.floats(allow_nan=False)
        case inspect.StrType():
            return st.text(max_size=20)
        case inspect.BytesType():
            return st.binary(max_size=40)
        case inspect.NoneType():
            return st.none()
        case inspect.EnumType():
            return st.sampled_from(list(kind.cls))
        case inspect.UnionType():
            return st.one_of([values(member) for member in kind.types])
        case inspect.VarTupleType():
            return st.lists(values(kind.item_type), max_size=4).map(tuple)
        case inspect.TupleType():
            return st.tuples(*[values(item) for item in kind.item_types])
        case inspect.DictType():
            return st.dictionaries(values(kind.key_type), values(kind.value_type), max_size=3)
        case inspect.StructType():
            fields = {field.name: values(field.type) for field in kind.fields}
            return st.builds(kind.cls, **fields)
    raise AssertionError(f"a type that no message used so far: {kind}")


@pytest.mark.parametrize(("union", "member"), MEMBERS, ids=lambda x: getattr(x, "__name__", x))
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_every_word_survives_the_wire(union: str, member: type, data: st.DataObject) -> None:
    word = data.draw(values(inspect.type_info(member)))
    encoded = msgspec.msgpack.encode(word)
    found = msgspec.msgpack.decode(encoded, type=UNIONS[union])
    assert type(found) is member
    assert found == word


@pytest.mark.parametrize("union", UNIONS)
@settings(max_examples=50, deadline=None)
@given(data=st.data())
def test_a_truncated_word_is_no_word(union: str, data: st.DataObject) -> None:
    word = data.draw(values(inspect.type_info(UNIONS[union])))
    encoded = msgspec.msgpack.encode(word)
    size = data.draw(st.integers(0, len(encoded) - 1))
    with pytest.raises(msgspec.DecodeError):
        msgspec.msgpack.decode(encoded[:size], type=UNIONS[union])


@pytest.mark.parametrize(("union", "member"), MEMBERS, ids=lambda x: getattr(x, "__name__", x))
def test_a_word_belongs_to_one_conversation(union: str, member: type) -> None:
    """Tags are unique within a union; a struct stands in one direction only."""
    homes = [name for name, other in UNIONS.items() if member in typing.get_args(other)]
    assert homes == [union]
    tags = [inspect.type_info(m).tag for m in typing.get_args(UNIONS[union])]  # type: ignore[attr-defined]
    assert len(set(tags)) == len(tags)


def test_every_struct_is_frozen_and_documented() -> None:
    structs = [
        value
        for value in vars(messages).values()
        if isinstance(value, type) and issubclass(value, msgspec.Struct)
    ]
    assert len(structs) > 20
    for struct in structs:
        assert struct.__struct_config__.frozen, struct


def test_hot_words_are_small() -> None:
    """One step's words cost tens of bytes, whatever the epoch."""
    step = messages.StepReady(messages.Epoch(1), messages.StepNumber(2**40))
    assert len(msgspec.msgpack.encode(step)) < 20
    done = messages.StepDone(messages.Epoch(1), messages.StepNumber(2**40))
    assert len(msgspec.msgpack.encode(done)) < 20
