"""The error tree crosses the wire: same class, same words, same details."""

from __future__ import annotations

import ast
import inspect
import pickle
import re
from base64 import b64encode
from urllib.parse import quote

import pytest
from google.protobuf import any_pb2, duration_pb2
from google.rpc import code_pb2, error_details_pb2, status_pb2
from hypothesis import given
from hypothesis import strategies as st

from specdec.core import errors
from specdec.core.errors import (
    InvalidArgument,
    Overloaded,
    PassFailed,
    ReplicaLost,
    SpecdecError,
    TooLarge,
    from_status,
    to_status,
)

CLASSES = [
    cls
    for _, cls in inspect.getmembers(errors, inspect.isclass)
    if issubclass(cls, SpecdecError) and cls is not SpecdecError
]
PLAIN = [cls for cls in CLASSES if cls not in (InvalidArgument, Overloaded)]
text = st.text(st.characters(codec="utf-8"), max_size=30)


def crossed(error: SpecdecError) -> SpecdecError:
    return from_status(status_pb2.Status.FromString(to_status(error).SerializeToString()))


@pytest.mark.parametrize("cls", PLAIN)
@given(message=text)
def test_every_class_survives_the_wire(cls, message):
    error = crossed(cls(message))
    assert type(error) is cls
    assert str(error) == message


@given(st.lists(st.tuples(text, text), min_size=1, max_size=4))
def test_violations_survive_the_wire(violations):
    error = crossed(InvalidArgument(violations))
    assert type(error) is InvalidArgument
    assert error.violations == tuple(violations)
    assert str(error) == str(InvalidArgument(violations))


@given(text, st.just(0.0) | st.floats(1e-3, 1e5))
def test_the_retry_delay_survives_the_wire(message, retry_after_s):
    error = crossed(Overloaded(message, retry_after_s))
    assert type(error) is Overloaded
    assert str(error) == message
    assert error.retry_after_s == pytest.approx(retry_after_s, abs=2e-9)


@pytest.mark.parametrize("cls", CLASSES)
def test_every_class_has_a_status_and_a_reason_of_its_own(cls):
    error = cls([("field", "what")]) if cls is InvalidArgument else cls("what")
    status = to_status(error)
    assert status.code not in (code_pb2.OK, code_pb2.UNKNOWN, code_pb2.INTERNAL)
    assert sum(other.__new__(other).reason == error.reason for other in CLASSES) == 1
    assert error.reason == re.sub(r"(?<=[a-z])(?=[A-Z])", "_", cls.__name__).upper(), "as the contract spells it"
    info = error_details_pb2.ErrorInfo()
    [unpacked] = [detail.Unpack(info) for detail in status.details if detail.Is(info.DESCRIPTOR)]
    assert unpacked
    assert (info.reason, info.domain) == (error.reason, "specdec")
    # The docstring of the module is the tree: it names every class with its status.
    docstring = ast.get_docstring(ast.parse(inspect.getsource(errors))) or ""
    [line] = [line for line in docstring.splitlines() if line.lstrip("│├└─ ").startswith(cls.__name__ + " ")]
    assert code_pb2.Code.Name(status.code) in line


CODES = [code for code in code_pb2.Code.values() if code != code_pb2.OK]


@pytest.mark.parametrize("code", CODES)
def test_a_foreign_status_becomes_an_error_of_ours(code):
    error = from_status(status_pb2.Status(code=code, message="from afar"))
    assert "from afar" in str(error)
    assert type(error) in CLASSES
    if code in (code_pb2.INTERNAL, code_pb2.UNKNOWN, code_pb2.CANCELLED, code_pb2.UNIMPLEMENTED, code_pb2.DATA_LOSS):
        assert type(error) is ReplicaLost
    if code == code_pb2.RESOURCE_EXHAUSTED:
        assert error.retry_after_s > 0


@pytest.mark.parametrize(
    "message",
    [
        "SERVER: Received message larger than max (5242885 vs. 4194304)",
        "CLIENT: Sent message larger than max (17825797 vs. 16777216)",
        "received metadata size exceeds soft limit (9592 vs. 8192);  :path:80B :authority:57B",
        "received metadata size exceeds hard limit (value length 40000 vs. 16384)",
    ],
)
def test_what_grpc_finds_too_large_is_not_to_be_sent_again(message):
    error = from_status(status_pb2.Status(code=code_pb2.RESOURCE_EXHAUSTED, message=message))
    assert type(error) is TooLarge
    assert str(error) in (
        f"the {what} of the call is larger than its receiver accepts" for what in ("message", "metadata")
    )
    quoted = to_status(Overloaded(message, 3.0))  # by a servicer, which says when to come again
    assert type(from_status(quoted)) is Overloaded


def test_an_unknown_reason_or_code_is_a_lost_replica():
    status = status_pb2.Status(code=code_pb2.UNAVAILABLE, message="x")
    status.details.add().Pack(error_details_pb2.ErrorInfo(reason="OF_NEXT_YEAR", domain="specdec"))
    status.details.append(any_pb2.Any(type_url="type.googleapis.com/no.such.Type", value=b"?"))
    assert type(from_status(status)) is ReplicaLost
    assert type(from_status(status_pb2.Status(code=77, message="x"))) is ReplicaLost


@pytest.mark.parametrize("name", ["ErrorInfo", "BadRequest", "RetryInfo"])
@pytest.mark.parametrize("value", [b"\xff", b"\x0a\x7f", b"\x0a\x02\xff\xfe"], ids=["no tag", "cut off", "no text"])
def test_unreadable_details_count_as_none(name, value):
    for code in CODES:
        status = status_pb2.Status(code=code, message="from afar")
        plain = from_status(status)
        status.details.append(any_pb2.Any(type_url=f"type.googleapis.com/google.rpc.{name}", value=value))
        error = from_status(status)
        assert (type(error), str(error)) == (type(plain), str(plain))
        assert type(error) is not Overloaded or error.retry_after_s == plain.retry_after_s


@pytest.mark.parametrize("seconds", [-(2**63), -1, 2**62, 2**63 - 1])
def test_an_absurd_delay_can_still_be_passed_on(seconds):
    status = status_pb2.Status(code=code_pb2.RESOURCE_EXHAUSTED, message="x")
    status.details.add().Pack(error_details_pb2.RetryInfo(retry_delay=duration_pb2.Duration(seconds=seconds)))
    error = from_status(status)
    assert 0 <= error.retry_after_s <= 7 * 86_400
    assert crossed(error).retry_after_s == error.retry_after_s


def metadata_bytes(error: SpecdecError) -> int:
    """What a status takes in the trailing metadata: its message percent-encoded, and all of it in base64."""
    status = to_status(error)
    return len(quote(status.message)) + len(b64encode(status.SerializeToString()))


@given(st.integers(1, 100), st.integers(1, 400), st.integers(0, 2000), st.sampled_from(["x", "ü", "言"]))
def test_a_refusal_fits_into_metadata_whatever_it_names(count, name_length, length, letter):
    violations = [(letter * name_length, letter * length)] * count
    error = InvalidArgument(violations)
    assert metadata_bytes(error) < 7500
    again = crossed(error)
    assert again.violations == error.violations, "a second time nothing is cut"
    *named, (_, tail) = again.violations
    assert len(named) == count - 1 or tail == f"and {count - len(named)} more"


def test_short_violations_are_all_named():
    for count in (1, 32, 33):
        violations = tuple((f"field{number}", "is no good") for number in range(count))
        assert crossed(InvalidArgument(violations)).violations == violations


@pytest.mark.parametrize("cls", PLAIN)
def test_a_long_message_is_cut(cls):
    error = cls("言" * 5000)
    assert metadata_bytes(error) < 7500
    assert str(crossed(error)).endswith("言…")


@pytest.mark.parametrize("error", [InvalidArgument([("a", "b")]), Overloaded("c", 2.5), PassFailed("d")], ids=str)
def test_an_error_is_the_same_in_another_process(error):
    other = pickle.loads(pickle.dumps(error))
    assert type(other) is type(error)
    assert (str(other), vars(other)) == (str(error), vars(error))
