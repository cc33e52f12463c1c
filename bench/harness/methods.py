"""The methods of drafting by name, and how each is served. Does not know what is asked."""

from __future__ import annotations

import pydoc_data.topics
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from bench.harness.command import Common
from bench.harness.deployment import Processes
from bench.harness.endpoints import Endpoint
from bench.harness.explain import endpoint_of
from bench.harness.models import Models, named
from bench.harness.runner import Contender
from draft_service.drafters.ngram_model import build
from specdec.cli.processes import Service
from specdec.client import Client
from specdec.runner.files import directory_of
from specdec.runner.vocabulary import Vocabulary, read_tokenizer

ALONE = "target alone"
NGRAM, ALL = "ngram", "all"
KV_SLOTS = 16384
"""Of each model. By default, the services of a benchmark would together reserve too much memory."""
_T = TypeVar("_T")
_HISTORY = "--lookup-history=100000"


@dataclass(frozen=True, slots=True)
class Method:
    """Flags of the target, the model of a draft service (empty: none), and flags of the orchestrator."""

    target: str = ""
    draft: str = ""
    orchestrator: str = "--lookup-history=0"


def with_models(models: Models) -> dict[str, Method]:
    """Prompt lookup, which is part of each method, and each draft and head. Heads have the names of their folders, and
    so have drafts if there are several."""
    drafts = {"draft": models.drafts[0]} if len(models.drafts) == 1 else named(models.drafts)
    methods = {"lookup": Method()} | {name: Method(draft=draft) for name, draft in drafts.items()}
    return methods | {name: Method(f"--head={head}") for name, head in named(models.heads).items()}


def all_methods(models: Models, ngram: str = "") -> dict[str, Method]:
    """All that these models can be served with, by name. ``ngram``: an n-gram file; empty: one is to be counted."""
    of_models = with_models(models)
    without = {"history": Method(orchestrator=_HISTORY), NGRAM: Method(draft=ngram)}
    without |= {name: Method(f"--self-draft={name}") for name in ("recycling", "lookahead")}
    heads = [name for name, method in of_models.items() if method.target]
    drafts = [name for name, method in of_models.items() if method.draft]
    methods = of_models | without
    if heads and drafts:
        both = Method(of_models[heads[0]].target, of_models[drafts[0]].draft)
        methods |= {f"{heads[0]} and {drafts[0]}": both, ALL: replace(both, orchestrator=_HISTORY)}
    return methods


def chosen(methods: Mapping[str, _T], names: Sequence[str]) -> dict[str, _T]:
    """Some of the methods; all without names. Raises ValueError for an unknown name."""
    if unknown := [name for name in names if name not in methods]:
        raise ValueError(f"there is no method {unknown[0]} with these models, but {', '.join(methods)}")
    return {name: methods[name] for name in names or methods}


@dataclass(frozen=True, slots=True)
class Serving:
    """Serves a target with methods. What two methods have in common is started once."""

    processes: Processes
    common: Common
    target: str
    kv_slots: int = KV_SLOTS
    flags: tuple[str, ...] = ()
    """Of both models."""

    async def start(self, method: Method) -> tuple[Service, Client]:
        """The orchestrator and its client. Raises StartError."""
        target, draft, flags = self._commands(method)
        return await self.processes.deployment(target, draft, *flags)

    async def endpoint(self, method: Method) -> Endpoint:
        """Raises StartError."""
        target, draft, flags = self._commands(method)
        return await endpoint_of(self.processes, target, draft, *flags)

    def _commands(self, method: Method) -> tuple[tuple[str, ...], tuple[str, ...], list[str]]:
        """Of the target and the draft, and flags of the orchestrator."""
        draft = self._command("draft", method.draft) if method.draft else ()
        target = self._command("target", self.target, *method.target.split())
        return target, draft, [f"--tokenizer={self.target}", *method.orchestrator.split()]

    def _command(self, role: str, model: str, *flags: str) -> tuple[str, ...]:
        return command_of(self.common, role, model, *self.flags, *flags, kv_slots=self.kv_slots)


def command_of(common: Common, role: str, model: str, *flags: str, kv_slots: int = KV_SLOTS) -> tuple[str, ...]:
    """The module of a model service and its flags. A draft that is a file is an n-gram model."""
    weights = f"--ngram={model}" if role == "draft" and Path(model).is_file() else f"--model={model}"
    dtype = [f"--dtype={common.dtype}"] if common.dtype else []
    return f"{role}_service", weights, f"--threads={common.threads}", f"--kv-slots={kv_slots}", *dtype, *flags


def against_alone(alone: Endpoint, others: Mapping[str, Endpoint]) -> list[Contender]:
    """The target alone, and others that must give the same texts."""
    contenders = [Contender(ALONE, alone.asks(num_draft_tokens=0))]
    return [*contenders, *(Contender(name, other.asks(), ALONE) for name, other in others.items())]


@asynccontextmanager
async def served(
    common: Common,
    target: str,
    methods: Mapping[str, Method],
    kv_slots: int = KV_SLOTS,
    flags: tuple[str, ...] = (),
    with_metrics: bool = False,
) -> AsyncIterator[list[Contender]]:
    """A target alone, and with each method. ``flags``: of both models. Raises StartError."""
    async with Processes(with_metrics) as processes:
        serving = Serving(processes, common, target, kv_slots, flags)
        alone = await serving.endpoint(Method())
        yield against_alone(alone, {name: await serving.endpoint(method) for name, method in methods.items()})


@asynccontextmanager
async def as_deployed(common: Common) -> AsyncIterator[list[Contender]]:
    """The running deployment without drafting, and as it is."""
    async with common.endpoint() as endpoint:
        yield against_alone(endpoint, {"as deployed": endpoint})


def count_help(target: str, directory: Path) -> str:
    """Write an n-gram model of a text that comes with Python and has none of the questions: its language reference, as
    ``help()`` shows it (about 120,000 tokens). Raises ValueError if the target has no tokenizer."""
    tokenizer = read_tokenizer(directory_of(target) / "tokenizer.json")
    vocabulary = Vocabulary.of(tokenizer)
    texts = [tokenizer.encode(text, add_special_tokens=False).ids for text in pydoc_data.topics.topics.values()]
    build(texts, len(vocabulary), vocabulary.fingerprint).save(directory / "help.npz")
    return str(directory / "help.npz")
