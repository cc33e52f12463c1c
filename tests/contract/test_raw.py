"""Raw streams, by which the tests of this folder see what a service answers."""

from __future__ import annotations

from typing import Any

import pytest
from google.rpc import code_pb2, status_pb2

from specdec.v1 import common_pb2, target_pb2
from testing.raw import Raw


class InternalError:
    """A call to a service that answers with an internal error."""

    def __aiter__(self) -> Any:
        return self._responses()

    async def _responses(self) -> Any:
        status = status_pb2.Status(code=code_pb2.INTERNAL)
        yield target_pb2.VerifyResponse(errors=[common_pb2.SequenceError(sequence=1, status=status)])

    def cancel(self) -> None: ...


async def test_an_internal_error_that_no_test_asks_for_is_raised_at_the_end() -> None:
    stream = Raw(InternalError(), target_pb2.VerifyRequest)
    await stream.frame_where(lambda frame: frame.errors)
    with pytest.raises(AssertionError, match="code: 13"):
        await stream.close()
