"""``python -m draft_service --model PATH``: serve a draft model."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from pydantic import Field, ValidationInfo, field_validator

from draft_service.drafter import Drafter
from specdec.core.settings import ModelServiceSettings, VllmSettings, parse
from specdec.server.model_server import ModelServer, run


class DraftSettings(ModelServiceSettings):
    """Serve a draft model over gRPC (specdec.v1.DraftService)."""

    model: str = Field("", description="checkpoint directory or hub id (safetensors)")
    ngram: str = Field("", description="file of `specdec ngram build`, in place of a model")
    target_tokenizer: str = Field(
        "", description="directory with the target's tokenizer.json, for a model with another vocabulary (engine torch)"
    )

    @field_validator("ngram")
    @classmethod
    def _one_of_both(cls, value: str, others: ValidationInfo) -> str:
        if bool(value) == bool(others.data.get("model")):
            raise ValueError("one of model and ngram is required")
        return value

    @field_validator("target_tokenizer")
    @classmethod
    def _of_engine_torch(cls, value: str, others: ValidationInfo) -> str:
        if value and others.data.get("ngram"):
            raise ValueError("an n-gram model has its target's vocabulary")
        if value and others.data.get("engine") == "vllm":
            raise ValueError("engine vllm drafts in the target's vocabulary only; engine torch has this")
        return value

    @field_validator("vllm")
    @classmethod
    def _without_adapters(cls, value: VllmSettings) -> VllmSettings:
        """A draft is the same for all adapters, and ``specdec up`` has one environment for target and draft."""
        return value.model_copy(update={"adapters": {}})


def _drafter(settings: DraftSettings) -> Drafter:
    if settings.ngram:
        from draft_service.drafters.ngram_drafter import NgramDrafter

        return NgramDrafter.load(Path(settings.ngram))
    if settings.engine == "vllm":
        from draft_service.drafters.vllm_drafter import SAMPLER, VllmDrafter
        from specdec.vllm.loading import load_engine

        return VllmDrafter(*load_engine(settings, SAMPLER))
    from draft_service.drafters.language_model import LanguageModelDrafter
    from specdec.runner.loading import load_runner

    runner = load_runner(settings)
    if settings.target_tokenizer:
        from draft_service.drafters.other_vocabulary.drafter import OtherVocabularyDrafter

        return OtherVocabularyDrafter.load(
            runner, settings.model, revision=settings.revision, target=Path(settings.target_tokenizer)
        )
    return LanguageModelDrafter(runner, runner.grammars)


def main() -> None:
    settings = parse(DraftSettings, sys.argv[1:], "draft_service")

    def build() -> Callable[[], ModelServer]:
        # Imported here so that bad settings are reported at once, not after seconds of importing torch.
        from draft_service.server import create_server

        drafter = _drafter(settings)
        return lambda: create_server(drafter, settings)

    run(settings, "draft", build)


if __name__ == "__main__":
    main()
