"""The frames of DraftService.Draft. See specdec.server.streams.Codec."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from draft_service.engine import DraftOpen
from specdec.core.errors import InvalidArgument, ModelMismatch, SpecdecError, to_status
from specdec.core.rounds import CACHE_SALT, Advance, Growth, Load, ModelInfo
from specdec.transport import wire
from specdec.transport.framing import framed
from specdec.v1 import common_pb2, draft_pb2


class DraftCodec:
    def __init__(self, info: ModelInfo) -> None:
        self._info = info

    def split(
        self, frame: draft_pb2.DraftRequest
    ) -> tuple[Iterable[draft_pb2.DraftOpen], Iterable[draft_pb2.Advance], Iterable[int]]:
        return frame.opens, frame.advances, frame.closes

    def read_open(self, message: draft_pb2.DraftOpen) -> DraftOpen:
        wanted = message.spec.model_digest
        if wanted and wanted != self._info.model_digest:
            raise ModelMismatch(f"this draft serves {self._info.model_digest}, not {wanted}")
        spec = wire.read_spec(message.spec, self._info.vocab_size)
        if spec.cache_salt and CACHE_SALT not in self._info.capabilities:
            raise InvalidArgument([("spec.cache_salt", "not possible with this draft")])
        return DraftOpen(spec, wire.read_budget(message.budget))

    def read_entry(self, message: draft_pb2.Advance) -> Advance:
        return wire.read_advance(message, self._info.vocab_size)

    def number(self, message: draft_pb2.Advance) -> int:
        return message.number

    def answers(self, result: Growth) -> int | None:
        return result.advance if result.end else None

    def attributes(self, result: Growth) -> dict[str, int]:
        return {"advance": result.advance, "base": result.base, "nodes": len(result.tree)}

    def frames(
        self, results: Sequence[tuple[int, Any]], unanswered: Iterable[int], load: Load
    ) -> Iterator[draft_pb2.DraftResponse]:
        load_message = wire.write_load(load)
        return framed(lambda: draft_pb2.DraftResponse(load=load_message), itertools.starmap(_entry, results))


def _entry(sequence: int, result: Any) -> tuple[str, Any]:
    if isinstance(result, SpecdecError):
        return "errors", common_pb2.SequenceError(sequence=sequence, status=to_status(result))
    return "growths", wire.write_growth(sequence, result)
