"""``python -m target_service --model PATH``: serve a target model."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field, ValidationInfo, field_validator

from specdec.core.rounds import LOOKUP
from specdec.core.settings import ModelServiceSettings, parse
from specdec.server.model_server import ModelServer, run
from target_service.verifier import Verifier

if TYPE_CHECKING:
    from specdec.runner.model_runner import ModelRunner


class TargetSettings(ModelServiceSettings):
    """Serve a target model over gRPC (specdec.v1.TargetService)."""

    head: str = Field(
        "",
        description="directory of a head that drafts for the target (EAGLE; engine torch: Medusa, ReDrafter; engine"
        " vllm: DFlash, a small model); empty: none",
    )
    self_draft: str = Field(
        "",
        description="drafting by the target without a head: lookup (what followed the last time, where the text repeats"
        " itself), recycling (a table of likely next tokens) or lookahead:W,N,G (n-grams from parallel guesses); engine"
        " vllm: lookup, or mtp (layers that the checkpoint has for it); empty: none",
    )

    @field_validator("self_draft")
    @classmethod
    def _is_known(cls, value: str, others: ValidationInfo) -> str:
        if value and others.data.get("head"):
            raise ValueError("head and self_draft are two ways to draft by the target itself: set one of them")
        if value and others.data.get("engine") == "vllm":
            if value not in (LOOKUP, "mtp"):
                raise ValueError(f"engine vllm has lookup and mtp, and {value} needs engine torch")
        elif value:
            # Here, since it imports torch.
            from target_service.self_draft.by_name import self_drafter

            self_drafter(value, vocab_size=1)  # refused before the model is loaded
        return value


def _verifier(settings: TargetSettings) -> Verifier[Any]:
    if settings.engine == "vllm":
        from specdec.vllm.loading import load_engine
        from target_service.heads.vllm_proposer import proposer
        from target_service.self_draft.text_lookup import TextLookup
        from target_service.vllm_verifier import SAMPLER, VllmVerifier

        lookup = TextLookup() if settings.self_draft == LOOKUP else None
        with proposer(settings.head, settings.self_draft, settings.model, settings.revision) as chosen:
            return VllmVerifier(*load_engine(settings, SAMPLER, proposer=chosen), lookup=lookup)
    from specdec.runner.loading import load_runner
    from target_service.language_model import LmVerifier

    if not settings.head:
        runner = load_runner(settings)
        if not settings.self_draft:
            return LmVerifier(runner, grammars=runner.grammars)
        from target_service.self_draft.by_name import self_drafter

        return LmVerifier(runner, self_drafter(settings.self_draft, runner.info.vocab_size), runner.grammars)
    from specdec.runner.files import directory_of
    from target_service.heads.checkpoint import read_head
    from target_service.heads.proof import proved

    files, trees = read_head(Path(settings.head)), []

    def add_head(runner: ModelRunner) -> None:
        trees.append(proved(files, runner, directory_of(settings.model, settings.revision)))

    runner = load_runner(settings, add_head)
    return LmVerifier(runner, trees[0], runner.grammars)


def main() -> None:
    settings = parse(TargetSettings, sys.argv[1:], "target_service")

    def build() -> Callable[[], ModelServer]:
        # Imported here so that bad settings are reported at once, not after seconds of importing torch.
        from target_service.server import create_server

        verifier = _verifier(settings)
        return lambda: create_server(verifier, settings)

    run(settings, "target", build)


if __name__ == "__main__":
    main()
