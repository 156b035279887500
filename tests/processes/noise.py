"""Random messages for a live server: from bytes that mean nothing to well-formed nonsense.

Owns only its random stream. Called by the fuzz test.
"""

from __future__ import annotations

import random

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

DEPTH_MAX = 5
ITEM_COUNT_MAX = 4
FIELD_CHANCE = 0.3
CHANGED_BYTES_MAX = 4
STAY_CHANCE = 0.2

INTEGERS = (0, 1, 2, 7, 100, 2**16, 2**31 - 1)
SIGNED = (*INTEGERS, -1, -(2**31))
FLOATS = (0.0, 1.0, 0.5, -1.0, 2.5, 1e-45, 3e38, float("nan"), float("inf"), float("-inf"))
TEXTS = ("", "a", "user", "Hi", "\x00", "é😊", "{", "{}", "a" * 300, "\n", "<|im_end|>")
BLOBS = (b"", b"\x00", b"k" * 16, b"\xff" * 40)


class Noise:
    """A seeded source of messages; equal seeds give equal messages."""

    def __init__(self, seed: int) -> None:
        self._draw = random.Random(seed)

    def junk(self) -> bytes:
        """Bytes without a meaning."""
        return self._draw.randbytes(self._draw.randrange(64))

    def truncated(self, wire: bytes) -> bytes:
        """A part of a serialised message from its start on."""
        return wire[: self._draw.randrange(len(wire) + 1)]

    def damaged(self, wire: bytes) -> bytes:
        """A serialised message with a few bytes replaced."""
        changed = bytearray(wire)
        for _ in range(self._draw.randint(1, CHANGED_BYTES_MAX) if wire else 0):
            changed[self._draw.randrange(len(changed))] = self._draw.randrange(256)
        return bytes(changed)

    def one_field_changed(self, message: Message) -> Message:
        """A copy with one field, at any depth, of a value in or out of its range."""
        changed = type(message)()
        changed.CopyFrom(message)
        target: Message = changed
        while nested := [
            field.name
            for field in target.DESCRIPTOR.fields
            if field.message_type is not None
            and not field.is_repeated
            and target.HasField(field.name)
        ]:
            if self._draw.random() < STAY_CHANCE:
                break
            target = getattr(target, self._draw.choice(nested))
        fields = [*target.DESCRIPTOR.fields]
        if fields:
            field = self._draw.choice(fields)
            target.ClearField(field.name)
            self._fill(target, field, depth=0)
        return changed

    def message(self, descriptor: Descriptor, depth: int = 0) -> Message:
        """Each field set or not, to values in and out of its range."""
        message = GetMessageClass(descriptor)()
        for field in descriptor.fields:
            if depth < DEPTH_MAX and self._draw.random() < FIELD_CHANCE:
                self._fill(message, field, depth)
        return message

    def _fill(self, message: Message, field: FieldDescriptor, depth: int) -> None:
        kind = field.message_type
        if kind is not None and kind.GetOptions().map_entry:
            target = getattr(message, field.name)
            key = self._scalar(kind.fields_by_name["key"])
            value = kind.fields_by_name["value"]
            if value.message_type is not None:
                target[key].CopyFrom(self.message(value.message_type, depth + 1))
            else:
                target[key] = self._scalar(value)
        elif field.is_repeated:
            target = getattr(message, field.name)
            for _ in range(self._draw.randint(1, ITEM_COUNT_MAX)):
                item = self._scalar(field) if kind is None else self.message(kind, depth + 1)
                target.append(item)
        elif kind is not None:
            getattr(message, field.name).CopyFrom(self.message(kind, depth + 1))
        else:
            setattr(message, field.name, self._scalar(field))

    def _scalar(self, field: FieldDescriptor) -> object:
        choose = self._draw.choice
        match field.cpp_type:
            case FieldDescriptor.CPPTYPE_INT32:
                return choose(SIGNED)
            case FieldDescriptor.CPPTYPE_INT64:
                return choose((*SIGNED, 2**63 - 1, -(2**63)))
            case FieldDescriptor.CPPTYPE_UINT32:
                return choose((*INTEGERS, 2**32 - 1))
            case FieldDescriptor.CPPTYPE_UINT64:
                return choose((*INTEGERS, 2**64 - 1))
            case FieldDescriptor.CPPTYPE_BOOL:
                return choose((False, True))
            case FieldDescriptor.CPPTYPE_FLOAT | FieldDescriptor.CPPTYPE_DOUBLE:
                return choose(FLOATS)
            case FieldDescriptor.CPPTYPE_ENUM:
                known = field.enum_type.values_by_number if field.enum_type else ()
                return choose([*known, 99])
            case FieldDescriptor.CPPTYPE_STRING:
                is_bytes = field.type == FieldDescriptor.TYPE_BYTES
                return choose(BLOBS) if is_bytes else choose(TEXTS)
        raise AssertionError(f"field {field.full_name} of the unknown type {field.cpp_type}")
