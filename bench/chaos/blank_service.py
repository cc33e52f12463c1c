"""``python -m bench.chaos.blank_service --port P ...``: a target with a real KV pool and a pass that only sleeps.

Everything but the model is real: admission, the look-up of cached text, decisions. Its text means nothing. So prompts
of any length can be tried on any machine.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

import torch
from pydantic import Field

from specdec.backends.choice import choose
from specdec.core.rounds import ModelInfo
from specdec.core.settings import EngineSettings, parse
from specdec.kvcache.block_pool import BlockPool, Move, SequenceCache
from specdec.passes.outputs import PassOutputs, RowOutputs
from specdec.passes.prefill import Chunk
from specdec.passes.rows import Segment
from specdec.sampling.grammar import Grammars
from specdec.server.model_server import run
from target_service.language_model import LmVerifier
from target_service.server import create_server

_END = 0
_LETTER = 66
"""A token with a text, so that each token is a chunk."""


class BlankSettings(EngineSettings):
    """Serve a target without a model."""

    pass_ms: float = Field(5.0, ge=0, description="milliseconds per pass")
    vocab_size: int = Field(4096, gt=1)
    context_length: int = Field(140_000, gt=1)
    kv_slots: int = Field(1 << 20, gt=0)
    tokenizer: str = Field("", description="tokenizer.json for grammars; empty: none are followed")


class BlankRunner:
    """In place of specdec.runner.model_runner.ModelRunner: one token is the most likely after any text."""

    def __init__(self, settings: BlankSettings) -> None:
        self.backend = choose("torch", torch.device("cpu"))
        self.chunk = Chunk()
        self.pool = BlockPool(settings.kv_slots // 16, 16)
        self.info = ModelInfo("blank", "blank", settings.vocab_size, "", settings.context_length, eos_token_ids=(_END,))
        self._pass_s = settings.pass_ms / 1e3

    def new_cache(self, salt: bytes = b"") -> SequenceCache:
        return SequenceCache(self.pool, salt)

    def move(self, moves: Sequence[Move]) -> None: ...

    def forward(self, segments: Sequence[Segment]) -> list[RowOutputs]:
        time.sleep(self._pass_s)
        return [self._outputs(segment) for segment in segments]

    def _outputs(self, segment: Segment) -> RowOutputs:
        logits = torch.zeros(len(segment.logit_rows), self.info.vocab_size)
        logits[:, _LETTER] = 1.0
        sound = torch.ones(len(segment.token_ids), dtype=torch.bool)
        return PassOutputs(logits, logits, sound, [_LETTER] * len(logits)).as_one()


def main() -> None:
    settings = parse(BlankSettings, sys.argv[1:], "bench.chaos.blank_service")
    followed = Grammars(settings.tokenizer, settings.vocab_size, [_END]) if settings.tokenizer else None
    verifier = LmVerifier(BlankRunner(settings), grammars=followed)  # type: ignore[arg-type]
    run(settings, "target", lambda: lambda: create_server(verifier, settings))


if __name__ == "__main__":
    main()
