"""Input that breaks the contract, and what a service must answer: shared by the tests of the three services."""

from __future__ import annotations

import math
import random
import re
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from specdec.core.errors import InvalidArgument, OutOfStep
from testing.raw import Raw
from tests.models.table_runner import TableRunner

NAN, INF = math.nan, math.inf
CONTEXT = 64


def runner(**fields: Any) -> TableRunner:
    return TableRunner(**{"context_length": CONTEXT, **fields})


async def assert_violation(stream: Raw, sequence: int, field: str) -> None:
    error = await stream.error(sequence)
    assert isinstance(error, InvalidArgument), (sequence, error)
    assert [name for name, _ in error.violations] == [field], error


async def assert_out_of_step(stream: Raw, sequence: int, expected: str) -> None:
    error = await stream.error(sequence)
    assert isinstance(error, OutOfStep), error
    assert re.search(rf"\b{expected}\b", str(error)), error


async def assert_never_opened(stream: Raw, **frame: Any) -> None:
    await stream.send(**frame)
    error = await stream.error(300)
    assert isinstance(error, OutOfStep)
    assert "never opened" in str(error)


NUMBERS = [0, 1, 2, 3, 4, 5, 7, 8, 63, 64, 2**31, 2**32 - 1]
REALS = [0.0, 1.0, 0.5, -1.0, NAN, INF, -INF, 1e-300, 1e300, 2.0, 0.9]
FEW = {"sequence": 12, "closes": 12, "n": 4, "num_draft_tokens": 8, "stop": 3, "min_tokens": 3}


def scribble(random_: random.Random, message: Message, depth: int = 0) -> Message:
    """Fills fields by chance, mostly with what nearly makes sense."""
    for field in message.DESCRIPTOR.fields:
        if random_.random() < (0.5 if depth else 0.25):
            continue
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            key, value = (field.message_type.fields_by_name[name] for name in ("key", "value"))
            entries = getattr(message, field.name)
            while random_.random() < 0.1:
                if value.message_type is not None:
                    scribble(random_, entries[_value(random_, key)], depth + 1)
                else:
                    entries[_value(random_, key)] = 1.0
        elif field.message_type is not None:
            if field.is_repeated:
                for _ in range(random_.randrange(4)):
                    scribble(random_, getattr(message, field.name).add(), depth + 1)
            elif field.name not in RARE or random_.random() < 0.05:
                scribble(random_, getattr(message, field.name), depth + 1)
                getattr(message, field.name).SetInParent()
        elif field.is_repeated:
            if field.name in RARE and random_.random() < 0.96:
                continue
            getattr(message, field.name).extend(_value(random_, field) for _ in range(random_.randrange(5)))
        elif field.name not in {*UNSUPPORTED, *RARE} or random_.random() < (
            0.03 if field.name in UNSUPPORTED else 0.04
        ):
            setattr(message, field.name, _value(random_, field))
    return message


UNSUPPORTED = {
    "grammar",
    "model_digest",
}

RARE = {
    *("chat", "logprobs", "prompt_logprobs", "num_logprobs", "num_prompt_logprobs", "allowed_token_ids", "bad_words"),
    *("prediction", "truncate_prompt_tokens", "add_special_tokens"),
}
"""Fields that are seldom right together with others."""


def _value(random_: random.Random, field: FieldDescriptor) -> Any:
    if field.name in FEW and random_.random() < 0.95:
        return "ab"[: random_.randrange(3)] if field.name == "stop" else random_.randrange(FEW[field.name])
    if field.cpp_type in (FieldDescriptor.CPPTYPE_DOUBLE, FieldDescriptor.CPPTYPE_FLOAT):
        value = random_.choice(REALS if random_.random() < 0.2 else [1.0, 0.5])
        return value if abs(value) < 1e38 or not math.isfinite(value) else 2.0
    if field.name == "cache_salt":
        salt = random_.choice([*[""] * 9, "a", "é" * 200])
        return salt.encode() if field.type == FieldDescriptor.TYPE_BYTES else salt
    if field.cpp_type == FieldDescriptor.CPPTYPE_STRING:
        return random_.choice(["", "w1 w2", "\x00", "é" * 40])
    if field.cpp_type == FieldDescriptor.CPPTYPE_BOOL:
        return random_.random() < 0.2
    if field.cpp_type == FieldDescriptor.CPPTYPE_ENUM:
        return random_.choice([0, 1, 1, 2, 3, 77])
    if field.cpp_type == FieldDescriptor.CPPTYPE_INT32:
        return random_.choice([-1, -1, 0, 1, 2, -2, 2**31 - 1, -(2**31)])
    return random_.choice(NUMBERS if random_.random() < 0.15 else NUMBERS[1:7])
