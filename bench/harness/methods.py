"""The methods of drafting by name, and how each is served. Does not know what is asked."""

from __future__ import annotations

import pydoc_data.topics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from bench.harness.command import Common
from bench.harness.deployment import Processes
from bench.harness.models import Models, named, service_of
from draft_service.drafters.ngram_model import build
from specdec.cli.processes import Service
from specdec.client import Client
from specdec.runner.files import directory_of
from specdec.runner.vocabulary import Vocabulary, read_tokenizer

ALONE = "target alone"
NGRAM, ALL = "ngram", "all"
_HISTORY = "--lookup-history=100000"


@dataclass(frozen=True, slots=True)
class Method:
    """Flags of the target, the model of a draft service (empty: none), and flags of the orchestrator."""

    target: str = ""
    draft: str = ""
    orchestrator: str = "--lookup-history=0"


def methods_of(models: Models, ngram: str = "") -> dict[str, Method]:
    """All that these models can be served with, by name; prompt lookup is part of each. Heads have the names of their
    folders, and so have drafts if there are several. ``ngram``: an n-gram file; empty: one is to be counted."""
    drafts = {"draft": models.drafts[0]} if len(models.drafts) == 1 else dict(named(models.drafts))
    methods = {"lookup": Method(), "history": Method(orchestrator=_HISTORY), NGRAM: Method(draft=ngram)}
    methods |= {name: Method(draft=draft) for name, draft in drafts.items()}
    methods |= {name: Method(f"--head={head}") for name, head in named(models.heads).items()}
    methods |= {name: Method(f"--self-draft={name}") for name in ("recycling", "lookahead")}
    if models.heads and models.drafts:
        (head, *_), (draft, *_) = named(models.heads), drafts
        both = Method(methods[head].target, methods[draft].draft)
        methods |= {f"{head} and {draft}": both, ALL: replace(both, orchestrator=_HISTORY)}
    return methods


def chosen(methods: dict[str, Method], names: Sequence[str]) -> dict[str, Method]:
    """Some of the methods; all without names. Raises ValueError for an unknown name."""
    if unknown := [name for name in names if name not in methods]:
        raise ValueError(f"there is no method {unknown[0]} with these models, but {', '.join(methods)}")
    return {name: methods[name] for name in names or methods}


async def serve(processes: Processes, common: Common, target: str, method: Method) -> tuple[Service, Client]:
    """Start what is not started yet. Raises StartError."""
    shared = {"dtype": common.dtype or "", "threads": common.threads}
    draft = service_of("draft", method.draft, **shared) if method.draft else ()
    flags = [f"--tokenizer={target}", *method.orchestrator.split()]
    return await processes.deployment(service_of("target", target, *method.target.split(), **shared), draft, *flags)


def count_help(target: str, directory: Path) -> str:
    """Write an n-gram model of a text that comes with Python and has none of the questions: its language reference, as
    ``help()`` shows it (about 120,000 tokens). Raises ValueError if the target has no tokenizer."""
    tokenizer = read_tokenizer(directory_of(target) / "tokenizer.json")
    vocabulary = Vocabulary.of(tokenizer)
    texts = [tokenizer.encode(text, add_special_tokens=False).ids for text in pydoc_data.topics.topics.values()]
    build(texts, len(vocabulary), vocabulary.fingerprint).save(directory / "help.npz")
    return str(directory / "help.npz")
