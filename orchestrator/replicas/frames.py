"""The frames of the two model services, seen from the orchestrator. See orchestrator.replicas.link.Frames."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from specdec.core.errors import from_status
from specdec.transport import wire
from specdec.v1 import draft_pb2, target_pb2


class TargetFrames:
    names = True

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size

    def frame(
        self, opens: list[target_pb2.TargetOpen], entries: list[target_pb2.Round], closes: list[int]
    ) -> target_pb2.VerifyRequest:
        return target_pb2.VerifyRequest(opens=opens, rounds=entries, closes=closes)

    def results(self, response: target_pb2.VerifyResponse) -> Iterator[tuple[int, Any]]:
        for verdict in response.verdicts:
            yield verdict.sequence, wire.read_verdict(verdict, self._vocab_size)
        for error in response.errors:
            yield error.sequence, from_status(error.status)

    def named(self, response: target_pb2.VerifyResponse) -> Iterator[int]:
        for each in response.progress:
            yield each.sequence


class DraftFrames:
    names = False

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size

    def frame(
        self, opens: list[draft_pb2.DraftOpen], entries: list[draft_pb2.Advance], closes: list[int]
    ) -> draft_pb2.DraftRequest:
        return draft_pb2.DraftRequest(opens=opens, advances=entries, closes=closes)

    def results(self, response: draft_pb2.DraftResponse) -> Iterator[tuple[int, Any]]:
        for growth in response.growths:
            yield growth.sequence, wire.read_growth(growth, self._vocab_size)
        for error in response.errors:
            yield error.sequence, from_status(error.status)

    def named(self, response: draft_pb2.DraftResponse) -> Iterator[int]:
        return iter(())
