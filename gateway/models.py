"""What a request may name as its model: the served model, by each of its names, and its adapters."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from gateway.errors import unknown_model
from specdec.v1.generation_pb2 import GetServerInfoResponse

_VALID_S = 5.0
"""How long an orchestrator's names count without asking again."""


class ServedModels:
    """``names``: of the model; empty: the one that the orchestrators give it."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self._name, self._adapters, self._asked_at = "", list[str](), -_VALID_S
        self.template = ""
        """The model's chat template."""

    async def checked(self, name: str | None, ask: Callable[[], Awaitable[GetServerInfoResponse]]) -> tuple[str, str]:
        """The name of the model, or of its adapter, that a request means by ``name``, and the adapter; empty: none.
        Raises HttpError for another name, and what ``ask``, which asks an orchestrator, raises."""
        now = time.monotonic()
        # To callers without a key all names are alike: what the name is, is asked with the key.
        if now - self._asked_at > _VALID_S or (name and name not in (*self._all_names, *self._adapters)):
            info = await ask()
            self._name, self.template = info.model_name, info.tokenizer.chat_template
            self._adapters = list(info.target.adapters)
            self._asked_at = now if self._name else self._asked_at
        names = self._all_names
        if not name or name in names or not names[0]:
            return names[0], ""
        if name not in self._adapters:
            raise unknown_model(name, [*names, *self._adapters])
        return name, name

    def described(self, info: GetServerInfoResponse) -> list[dict[str, Any]]:
        """All of them, as OpenAI describes models."""
        names = self._names or [info.model_name]
        model = {"object": "model", "created": 0, "owned_by": "specdec", "max_model_len": info.target.context_length}
        adapters = [{"id": name, **model, "parent": names[0]} for name in info.target.adapters if name not in names]
        return [*({"id": name, **model} for name in names), *adapters]

    @property
    def _all_names(self) -> Sequence[str]:
        return self._names or [self._name]
