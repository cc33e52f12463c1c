"""The errors between a caller and a service, and their gRPC statuses. Does not know which service raises them.

SpecdecError
├── InvalidArgument      INVALID_ARGUMENT     fix the named fields
├── ContextExceeded      OUT_OF_RANGE         shorten the request
├── Overloaded           RESOURCE_EXHAUSTED   retry after retry_after_s
├── TooLarge             RESOURCE_EXHAUSTED   shorten the message or its metadata
├── Unauthenticated      UNAUTHENTICATED      send a valid token
├── PermissionDenied     PERMISSION_DENIED    use the certificate of a permitted client
├── OutOfStep            ABORTED              replay: caller and replica disagree about the sequence's base
├── Preempted            ABORTED              replay: its memory was needed
├── ReplicaLost          UNAVAILABLE          use another replica
│   ├── PassFailed       UNAVAILABLE          use another replica; the model failed on this one
│   └── Draining         UNAVAILABLE          use another replica; this one is draining
├── NoReplica            UNAVAILABLE          retry when the deployment has recovered
│   └── GivenUp          UNAVAILABLE          do not retry: too many replicas or orchestrators failed under this request
├── ModelMismatch        FAILED_PRECONDITION  fix the deployment
└── DeadlineExceeded     DEADLINE_EXCEEDED    -

The last column tells the caller what to do. An error crosses the wire as google.rpc.Status with an ErrorInfo; the
ErrorInfo's reason names the class, and the peer raises the same class. INTERNAL is reserved for bugs in this code.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from typing import Any, ClassVar

from google.protobuf import duration_pb2
from google.protobuf.message import DecodeError, Message
from google.rpc import code_pb2, error_details_pb2, status_pb2

DOMAIN = "specdec"
_MAX_VIOLATIONS = 32
"""Violations that a status names."""
_MAX_VIOLATION_BYTES, _MAX_DESCRIPTION_BYTES, _MAX_FIELD_BYTES = 3072, 320, 120
"""Limits of all violations together, of one description, of one field name. A status travels in metadata, limited to
8 KiB by gRPC: once in base64, and its message again with three bytes for each byte that is not ASCII."""
_MAX_MESSAGE_BYTES, _MAX_SUMMARY_BYTES = 1024, 512
"""Limits of a status's message without and with violations next to it."""
_REST_BYTES = 64
"""Space for the number of violations that are not named."""

_MAX_RETRY_AFTER_S = 7 * 86_400.0
"""Limit of a delay that a peer sends: a Duration for the next caller could not hold an arbitrary one."""


class SpecdecError(Exception):
    """Base of the tree. ``str(error)`` is a sentence for the caller."""

    code: ClassVar[int] = code_pb2.UNKNOWN

    @property
    def reason(self) -> str:
        """The class name in the spelling of ErrorInfo.reason, such as OUT_OF_STEP."""
        return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", type(self).__name__).upper()

    def __reduce__(self) -> tuple[Any, ...]:
        return from_status, (to_status(self),)  # between processes as between services


class InvalidArgument(SpecdecError):
    """One or more fields are malformed, unknown or unsupported. Each violation is (field, description)."""

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


class TooLarge(SpecdecError):
    """gRPC's own refusal of a message or metadata, which has no details."""

    code = code_pb2.RESOURCE_EXHAUSTED


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
    """``problems``: those of the replicas, with their addresses. They are for operators alone."""

    code = code_pb2.UNAVAILABLE

    def __init__(self, message: str, problems: str = "") -> None:
        super().__init__(f"{message} ({problems})" if problems else message)
        self.for_clients = message


class GivenUp(NoReplica):
    pass


class ModelMismatch(SpecdecError):
    code = code_pb2.FAILED_PRECONDITION


class DeadlineExceeded(SpecdecError):
    code = code_pb2.DEADLINE_EXCEEDED


CALLERS_FAULTS = (InvalidArgument, ContextExceeded, TooLarge, Unauthenticated, PermissionDenied)
"""Errors of the request, which say nothing about the health of the deployment."""

_TOO_LARGE = re.compile(r"(Sent|Received) message larger than max|metadata size exceeds")
"""How gRPC refuses what is too large, with a status that else means that another try may help."""

_BY_REASON: dict[str, type[SpecdecError]] = {
    cls.__new__(cls).reason: cls
    for cls in (
        ContextExceeded,
        TooLarge,
        Unauthenticated,
        PermissionDenied,
        OutOfStep,
        Preempted,
        ReplicaLost,
        PassFailed,
        Draining,
        NoReplica,
        GivenUp,
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
    """As many violations as fit into a status; a last one counts the others. Idempotent."""
    cut = [(_cut(name, _MAX_FIELD_BYTES), _cut(what, _MAX_DESCRIPTION_BYTES)) for name, what in violations]
    ends = list(itertools.accumulate(len(name.encode()) + len(what.encode()) for name, what in cut))
    if not ends or (len(ends) <= _MAX_VIOLATIONS + 1 and ends[-1] <= _MAX_VIOLATION_BYTES):
        return tuple(cut)
    named = sum(end <= _MAX_VIOLATION_BYTES - _REST_BYTES for end in ends[:_MAX_VIOLATIONS])
    return (*cut[:named], ("request", f"and {len(cut) - named} more"))


def _cut(text: str, max_bytes: int) -> str:
    """``text`` cut to at most ``max_bytes`` of UTF-8."""
    data = text.encode("utf-8", "replace")
    return text if len(data) <= max_bytes else data[: max_bytes - 3].decode("utf-8", "ignore") + "…"


def to_status(error: SpecdecError) -> status_pb2.Status:
    """The status that carries ``error`` over the wire."""
    max_bytes = _MAX_SUMMARY_BYTES if isinstance(error, InvalidArgument) else _MAX_MESSAGE_BYTES
    status = status_pb2.Status(code=error.code, message=_cut(str(error), max_bytes))
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
    """The error that a peer sent; every status gives an error of this tree. An unknown code means ReplicaLost, and
    unreadable details are ignored."""
    info = error_details_pb2.ErrorInfo()
    bad_request = error_details_pb2.BadRequest()
    retry = error_details_pb2.RetryInfo()
    readable = [_unpacked(status, message) for message in (info, bad_request, retry)]
    if status.code == code_pb2.INVALID_ARGUMENT:
        violations = [(v.field, v.description) for v in bad_request.field_violations]
        return InvalidArgument(violations or [("request", status.message)])
    if status.code == code_pb2.RESOURCE_EXHAUSTED and info.reason != "TOO_LARGE":
        if not readable[0] and (match := _TOO_LARGE.search(status.message)):
            what = "the metadata" if "metadata" in match[0] else "the message"
            return TooLarge(f"{what} of the call is larger than its receiver accepts")
        if not readable[-1]:
            return Overloaded(status.message)
        delay_s = retry.retry_delay.ToNanoseconds() / 1e9
        return Overloaded(status.message, min(max(0.0, delay_s), _MAX_RETRY_AFTER_S))
    by_code = _BY_CODE.get(status.code, ReplicaLost)
    return _BY_REASON.get(info.reason, by_code)(status.message)


def _unpacked(status: status_pb2.Status, message: Message) -> bool:
    """Fill ``message`` from the details. False if it is missing or unreadable; then ``message`` is empty."""
    is_readable = False
    for detail in status.details:
        if detail.Is(message.DESCRIPTOR):
            try:
                detail.Unpack(message)
                is_readable = True
            except DecodeError:
                message.Clear()
                return False
    return is_readable
