"""Everything that can go wrong between a caller and a service, and the gRPC status it becomes.

SpecdecError
├── InvalidArgument      INVALID_ARGUMENT     fix the named fields
├── ContextExceeded      OUT_OF_RANGE         shorten
├── Overloaded           RESOURCE_EXHAUSTED   come back after retry_after_s
├── Unauthenticated      UNAUTHENTICATED      send a token that is known
├── PermissionDenied     PERMISSION_DENIED    call with the certificate of somebody who may
├── OutOfStep            ABORTED              replay: the sequence does not stand where the caller thinks
├── Preempted            ABORTED              replay: its memory was needed
├── ReplicaLost          UNAVAILABLE          another replica
│   ├── PassFailed       UNAVAILABLE          another replica; the model failed on this one
│   └── Draining         UNAVAILABLE          another replica; this one is going away in good order
├── NoReplica            UNAVAILABLE          come back when the deployment is whole
├── ModelMismatch        FAILED_PRECONDITION  fix the deployment
└── DeadlineExceeded     DEADLINE_EXCEEDED    -

Each crosses the wire as google.rpc.Status with an ErrorInfo whose reason is the class, and comes back as the
same class. Nothing here is INTERNAL: that status is left for our own bugs.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from typing import ClassVar

from google.protobuf import duration_pb2
from google.protobuf.message import DecodeError, Message
from google.rpc import code_pb2, error_details_pb2, status_pb2

DOMAIN = "specdec"
_MOST_VIOLATIONS = 32
"""That are named."""
_MOST_BYTES, _MOST_OF_ONE, _MOST_OF_NAME = 3072, 320, 120
"""Of all violations together, of one's description, of its field's name. A status travels in metadata, of which gRPC
takes 8 KiB: in base64, and its message once more with three bytes for each that is not ASCII."""
_MOST_OF_MESSAGE, _MOST_OF_SUMMARY = 1024, 512
"""Bytes of a status's message, and of one whose violations are told beside it."""
_TAIL = 64
"""Room for saying how many violations are not named."""

_LONGEST_DELAY_S = 7 * 86_400.0
"""That a peer is believed; beyond some limit a delay could not be told to the next caller."""


class SpecdecError(Exception):
    """Base of the tree. ``str(error)`` is a sentence for the caller."""

    code: ClassVar[int] = code_pb2.UNKNOWN

    @property
    def reason(self) -> str:
        """The class name in the spelling of ErrorInfo.reason, such as OUT_OF_STEP."""
        return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", type(self).__name__).upper()


class InvalidArgument(SpecdecError):
    """One or more fields are malformed, unknown or unsupported: (field, what is wrong) each."""

    code = code_pb2.INVALID_ARGUMENT

    def __init__(self, violations: Sequence[tuple[str, str]]) -> None:
        self.violations = _bounded(violations)
        super().__init__("; ".join(f"{name}: {what}" for name, what in self.violations))


class ContextExceeded(SpecdecError):
    code = code_pb2.OUT_OF_RANGE


class Overloaded(SpecdecError):
    code = code_pb2.RESOURCE_EXHAUSTED

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Unauthenticated(SpecdecError):
    code = code_pb2.UNAUTHENTICATED


class PermissionDenied(SpecdecError):
    code = code_pb2.PERMISSION_DENIED


class OutOfStep(SpecdecError):
    code = code_pb2.ABORTED


class Preempted(SpecdecError):
    code = code_pb2.ABORTED


class ReplicaLost(SpecdecError):
    code = code_pb2.UNAVAILABLE


class PassFailed(ReplicaLost):
    pass


class Draining(ReplicaLost):
    pass


class NoReplica(SpecdecError):
    code = code_pb2.UNAVAILABLE


class ModelMismatch(SpecdecError):
    code = code_pb2.FAILED_PRECONDITION


class DeadlineExceeded(SpecdecError):
    code = code_pb2.DEADLINE_EXCEEDED


CALLERS_FAULTS = (InvalidArgument, ContextExceeded, Unauthenticated, PermissionDenied)
"""What says nothing of the deployment's health."""

_BY_REASON: dict[str, type[SpecdecError]] = {
    cls.__new__(cls).reason: cls
    for cls in (
        ContextExceeded,
        Unauthenticated,
        PermissionDenied,
        OutOfStep,
        Preempted,
        ReplicaLost,
        PassFailed,
        Draining,
        NoReplica,
        ModelMismatch,
        DeadlineExceeded,
    )
}
_BY_CODE: dict[int, type[SpecdecError]] = {
    code_pb2.OUT_OF_RANGE: ContextExceeded,
    code_pb2.UNAUTHENTICATED: Unauthenticated,
    code_pb2.PERMISSION_DENIED: PermissionDenied,
    code_pb2.ABORTED: OutOfStep,
    code_pb2.UNAVAILABLE: ReplicaLost,
    code_pb2.FAILED_PRECONDITION: ModelMismatch,
    code_pb2.DEADLINE_EXCEEDED: DeadlineExceeded,
}


def _bounded(violations: Sequence[tuple[str, str]]) -> tuple[tuple[str, str], ...]:
    """As many as fit into a status, and a last one that counts the others; what comes out of this stays as it is."""
    cut = [(_cut(name, _MOST_OF_NAME), _cut(what, _MOST_OF_ONE)) for name, what in violations]
    ends = list(itertools.accumulate(len(name.encode()) + len(what.encode()) for name, what in cut))
    if not ends or (len(ends) <= _MOST_VIOLATIONS + 1 and ends[-1] <= _MOST_BYTES):
        return tuple(cut)
    named = sum(end <= _MOST_BYTES - _TAIL for end in ends[:_MOST_VIOLATIONS])
    return (*cut[:named], ("request", f"and {len(cut) - named} more"))


def _cut(text: str, most: int) -> str:
    """To at most so many bytes."""
    data = text.encode("utf-8", "replace")
    return text if len(data) <= most else data[: most - 3].decode("utf-8", "ignore") + "…"


def to_status(error: SpecdecError) -> status_pb2.Status:
    """The error as it crosses the wire."""
    most = _MOST_OF_SUMMARY if isinstance(error, InvalidArgument) else _MOST_OF_MESSAGE
    status = status_pb2.Status(code=error.code, message=_cut(str(error), most))
    status.details.add().Pack(error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN))
    if isinstance(error, InvalidArgument):
        bad_request = error_details_pb2.BadRequest()
        for name, what in error.violations:
            bad_request.field_violations.add(field=name, description=what)
        status.details.add().Pack(bad_request)
    if isinstance(error, Overloaded):
        delay = duration_pb2.Duration()
        delay.FromNanoseconds(int(error.retry_after_s * 1e9))
        status.details.add().Pack(error_details_pb2.RetryInfo(retry_delay=delay))
    return status


def from_status(status: status_pb2.Status) -> SpecdecError:
    """The error that a peer sent. A status of unknown cause counts as the loss of the replica, and details that cannot
    be read as none: whatever a peer says, it is an error of this tree."""
    info = error_details_pb2.ErrorInfo()
    bad_request = error_details_pb2.BadRequest()
    retry = error_details_pb2.RetryInfo()
    there = [_unpacked(status, message) for message in (info, bad_request, retry)]
    if status.code == code_pb2.INVALID_ARGUMENT:
        violations = [(v.field, v.description) for v in bad_request.field_violations]
        return InvalidArgument(violations or [("request", status.message)])
    if status.code == code_pb2.RESOURCE_EXHAUSTED:
        if not there[-1]:
            return Overloaded(status.message)
        delay_s = retry.retry_delay.ToNanoseconds() / 1e9
        return Overloaded(status.message, min(max(0.0, delay_s), _LONGEST_DELAY_S))
    by_code = _BY_CODE.get(status.code, ReplicaLost)
    return _BY_REASON.get(info.reason, by_code)(status.message)


def _unpacked(status: status_pb2.Status, message: Message) -> bool:
    """Fill ``message`` from the details; False if it is not there, and then it is empty."""
    found = False
    for detail in status.details:
        if detail.Is(message.DESCRIPTOR):
            try:
                detail.Unpack(message)
                found = True
            except DecodeError:
                message.Clear()
                return False
    return found
