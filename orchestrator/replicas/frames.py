"""The frames of the two model services, seen from the orchestrator. See orchestrator.replicas.link.Frames."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from orchestrator.replicas.allowances import MESSAGE, size_of_growth, size_of_logprobs, size_of_verdict
from specdec.core.errors import from_status
from specdec.transport import wire
from specdec.transport.logprobs_wire import read_prompt_logprobs
from specdec.v1 import draft_pb2, target_pb2

Entry = tuple[int, int, Callable[[], Any]]


class TargetFrames:
    names = True

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size

    def frame(
        self, opens: list[target_pb2.TargetOpen], entries: list[target_pb2.Round], closes: list[int]
    ) -> target_pb2.VerifyRequest:
        return target_pb2.VerifyRequest(opens=opens, rounds=entries, closes=closes)

    def entries(self, response: target_pb2.VerifyResponse) -> Iterator[Entry]:
        for part in response.prompt_logprobs:
            read = partial(read_prompt_logprobs, part, self._vocab_size)
            yield part.sequence, MESSAGE + size_of_logprobs(part.logprobs), read
        for verdict in response.verdicts:
            yield verdict.sequence, size_of_verdict(verdict), partial(wire.read_verdict, verdict, self._vocab_size)
        for error in response.errors:
            yield error.sequence, MESSAGE, partial(from_status, error.status)

    def heartbeats(self, response: target_pb2.VerifyResponse) -> Sequence[target_pb2.Progress]:
        return response.progress


class DraftFrames:
    names = False

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size

    def frame(
        self, opens: list[draft_pb2.DraftOpen], entries: list[draft_pb2.Advance], closes: list[int]
    ) -> draft_pb2.DraftRequest:
        return draft_pb2.DraftRequest(opens=opens, advances=entries, closes=closes)

    def entries(self, response: draft_pb2.DraftResponse) -> Iterator[Entry]:
        for growth in response.growths:
            yield growth.sequence, size_of_growth(growth), partial(wire.read_growth, growth, self._vocab_size)
        for error in response.errors:
            yield error.sequence, MESSAGE, partial(from_status, error.status)

    def heartbeats(self, response: draft_pb2.DraftResponse) -> Sequence[Any]:
        return ()
