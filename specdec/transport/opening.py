"""The messages that open one sequence at a target or at a draft, a part of the ids in each.

Knows what an open carries; does not know streams, nor why a sequence is opened.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from specdec.core.rounds import Budget, TargetOpen
from specdec.core.sequence import SequenceSpec
from specdec.transport import wire
from specdec.v1 import common_pb2, draft_pb2, target_pb2


def target_open(
    number: int, open_: TargetOpen, model_digest: str = "", traceparent: str = ""
) -> Iterator[target_pb2.TargetOpen]:
    """``number``: that of the sequence within its stream."""
    for part, more in _parts(open_.spec, model_digest, traceparent):
        yield wire.write_target_open(number, open_, part=part, more=more)


def draft_open(number: int, spec: SequenceSpec, budget: Budget, traceparent: str = "") -> Iterator[draft_pb2.DraftOpen]:
    """``number``: that of the sequence within its stream."""
    for part, more in _parts(spec, "", traceparent):
        yield draft_pb2.DraftOpen(sequence=number, spec=part, more=more, budget=wire.write_budget(budget))


def _parts(spec: SequenceSpec, digest: str, traceparent: str) -> Iterator[tuple[common_pb2.SequenceSpec, bool]]:
    """The parts of a spec, and whether more follow. Each has a part of the ids, the first also everything else."""
    ids = spec.token_ids
    for start in range(0, len(ids), wire.IDS_PER_OPEN):
        first = dataclasses.replace(spec, token_ids=())
        part = common_pb2.SequenceSpec() if start else wire.write_spec(first, digest, traceparent)
        part.token_ids.extend(ids[start : start + wire.IDS_PER_OPEN])
        yield part, start + wire.IDS_PER_OPEN < len(ids)
