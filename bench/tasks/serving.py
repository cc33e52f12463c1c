"""Serves the methods: an orchestrator for each, and the model services that they share. Does not know what is asked."""

from __future__ import annotations

import pydoc_data.topics
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from bench.harness.deployment import Processes
from bench.tasks.methods import ALONE, METHODS, beside_flag
from draft_service.drafters.ngram_model import build
from specdec.cli.fetch import SmolLm2
from specdec.cli.processes import Service
from specdec.client import Client
from specdec.runner.vocabulary import Vocabulary, read_tokenizer


@asynccontextmanager
async def served(
    models: SmolLm2, names: Sequence[str], threads: int, ngram: Path | None
) -> AsyncIterator[dict[str, tuple[Service, Client]]]:
    """The orchestrator of each method and a client of it, the target alone first. ``ngram``: of specdec ngram build;
    None: ``count_help``'s. Raises StartError."""
    shared = [f"--threads={threads}", "--kv-slots=16384"]
    with tempfile.TemporaryDirectory(prefix="specdec-") as directory:
        async with Processes() as made:
            targets, drafts = {}, {}
            for each in sorted({"", *(METHODS[name].beside for name in names)}):
                flags = [f"--model={models.target}", *beside_flag(each, models.head.parent), *shared]
                targets[each] = (await made.model("target_service", *flags)).address
            for each in sorted({METHODS[name].draft for name in names} - {""}):
                model = f"--model={models.draft}"
                if each == "ngram":
                    model = f"--ngram={ngram or count_help(models.target, Path(directory))}"
                drafts[each] = (await made.model("draft_service", model, *shared)).address
            found = {}
            for name in (ALONE, *names):
                method = METHODS.get(name, METHODS["lookup"])
                flags = [f"--target={targets[method.beside]}", f"--tokenizer={models.target}"]
                flags += [f"--draft={drafts[method.draft]}"] if method.draft else []
                found[name] = await made.orchestrator(*flags, f"--lookup-history={method.history}")
            yield found


def count_help(tokenizer: Path, directory: Path) -> Path:
    """Write an n-gram model of a text that comes with Python and has none of the questions: its language reference, as
    ``help()`` shows it (about 120,000 tokens)."""
    found = read_tokenizer(tokenizer / "tokenizer.json")
    vocabulary = Vocabulary.of(found)
    texts = [found.encode(text, add_special_tokens=False).ids for text in pydoc_data.topics.topics.values()]
    build(texts, len(vocabulary), vocabulary.fingerprint).save(directory / "help.npz")
    return directory / "help.npz"
