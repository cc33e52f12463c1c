"""The grammar that a request asks for. Knows requests and their owners; does not know how a grammar is compiled.

A grammar is compiled several times: by GrammarSandbox in a child process, to learn whether it is safe; here, for tokens
that it forces; and at the target and the draft, for its mask (specdec.sampling.logits_processors).
"""

from __future__ import annotations

import asyncio
import json
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

from orchestrator.drafting.forced_tokens import BUDGET
from orchestrator.request import Caller
from specdec.core.errors import InvalidArgument, Overloaded
from specdec.core.limits import MAX_GRAMMAR_BYTES
from specdec.core.rounds import GRAMMAR, ModelInfo
from specdec.sampling.grammar import Compiled, Grammars
from specdec.sampling.grammar_sandbox import GrammarSandbox, Reasoning
from specdec.v1 import generation_pb2

_FORMS = ("grammar", "json_schema", "regex", "choices")

_NOT_WITH = ("ignore_eos", "min_tokens", "allowed_token_ids", "bad_words")
"""Each could forbid all that the grammar allows."""

THINKS, THOUGHT = "<think>", "</think>"
"""Around reasoning."""

_KEPT = 256
"""Answers of the sandbox that are kept for later requests."""


def is_supported(target: ModelInfo) -> bool:
    """A complete output ends with an end token."""
    return GRAMMAR in target.capabilities and bool(target.eos_token_ids)


def problems(
    message: generation_pb2.GenerateRequest, target: ModelInfo, has_tokenizer: bool
) -> Iterator[tuple[str, str]]:
    """(field, problem), without reading the grammar itself."""
    given = _given(message)
    if not given:
        return
    if len(given) > 1:
        yield given[1], f"not possible with {given[0]}"
    if not is_supported(target):
        yield given[0], "not supported by this target"
    elif not has_tokenizer:
        yield given[0], "this server has no tokenizer"
    for name in _NOT_WITH:
        if getattr(message, name):
            yield name, f"not possible with {given[0]}"
    texts = list(message.choices) if given[0] == "choices" else [getattr(message, given[0])]
    if not all(texts):
        yield given[0], "must not be empty"
    if (size := sum(len(text.encode()) for text in texts)) > MAX_GRAMMAR_BYTES // 2:
        yield given[0], f"at most {MAX_GRAMMAR_BYTES // 2} bytes, not {size}"


def of_caller(error: InvalidArgument, message: generation_pb2.GenerateRequest) -> InvalidArgument:
    """A target's error with the names of the caller's fields."""
    [form] = _given(message)[:1] or ["grammar"]
    shorts = (name.removeprefix("spec.").removeprefix("sampling.") for name, _ in error.violations)
    names = [form if short == "grammar" else short for short in shorts]
    return InvalidArgument([(name, what) for name, (_, what) in zip(names, error.violations, strict=True)])


_Key = tuple[str, bytes, str, str, Reasoning]
"""Model digest, owner, form and text of a grammar, and what may be before it."""


class Grammar(NamedTuple):
    """In llguidance's form (empty: none), and compiled here for the tokens that it forces."""

    text: str = ""
    compiled: Future[Compiled] | None = None


class RequestGrammars:
    """The grammars of requests. What is known of a grammar is kept by owner, as compiled ones are."""

    def __init__(self, tokenizer: Path) -> None:
        """``tokenizer``: a tokenizer.json."""
        self._tokenizer = str(tokenizer)
        self._models: dict[tuple[int, tuple[int, ...]], asyncio.Task[_ModelGrammars]] = {}
        self._read: OrderedDict[_Key, asyncio.Task[str]] = OrderedDict()
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def prepare(self, target: ModelInfo) -> _ModelGrammars:
        """What grammars of requests to this target need: a first request takes some hundred milliseconds without."""
        key = target.vocab_size, tuple(target.eos_token_ids)
        if key not in self._models:
            self._models[key] = asyncio.create_task(_ModelGrammars.new(self._tokenizer, *key))
        return await asyncio.shield(self._models[key])

    async def read(
        self, message: generation_pb2.GenerateRequest, target: ModelInfo, caller: Caller, *, prompt_end: str
    ) -> Grammar:
        """The grammar of a request. Accounts take turns at the sandbox. ``prompt_end``: the last words of its prompt.
        Raises InvalidArgument."""
        form = next(iter(_given(message)), None)
        if form is None:
            return Grammar()
        text = json.dumps(list(message.choices)) if form == "choices" else getattr(message, form)
        reasoning = _reasoning(message, form, text, prompt_end=prompt_end)
        key = target.model_digest, caller.owner, form, text, reasoning
        model = await self.prepare(target)
        if key not in self._read:
            check = partial(model.sandbox.checked, form, text, reasoning)
            await self._begin(key, check, caller.account)
        self._read.move_to_end(key)
        grammar = await asyncio.shield(self._read[key])
        return Grammar(grammar, model.grammars.start(grammar, caller.owner))

    async def _begin(self, key: _Key, check: Callable[[], Coroutine[Any, Any, str]], account: str) -> None:
        """Begin to read, one grammar at a time for each account, so that one account's do not take every child. A
        request that is cancelled before takes its grammar back."""
        turn = self._turns.setdefault(account, asyncio.Lock())
        await turn.acquire()
        if key in self._read:  # by an equal request before
            turn.release()
            return
        self._read[key] = asyncio.create_task(check())
        self._read[key].add_done_callback(partial(self._end, key, turn))
        if len(self._read) > _KEPT:
            self._read.popitem(last=False)

    def _end(self, key: _Key, turn: asyncio.Lock, task: asyncio.Task[str]) -> None:
        if task.cancelled() or isinstance(task.exception(), Overloaded):
            self._read.pop(key, None)
        turn.release()

    async def close(self) -> None:
        for task in (*self._read.values(), *self._models.values()):
            task.cancel()
        for model in await asyncio.gather(*self._models.values(), return_exceptions=True):
            if isinstance(model, _ModelGrammars):
                await model.sandbox.close()


class _ModelGrammars(NamedTuple):
    sandbox: GrammarSandbox
    grammars: Grammars

    @staticmethod
    async def new(tokenizer: str, vocab_size: int, end_token_ids: tuple[int, ...]) -> _ModelGrammars:
        grammars = await asyncio.to_thread(
            partial(Grammars, tokenizer, vocab_size, end_token_ids=end_token_ids, budget=BUDGET)
        )
        return _ModelGrammars(GrammarSandbox(tokenizer, vocab_size, end_token_ids), grammars)


def _reasoning(message: generation_pb2.GenerateRequest, form: str, text: str, *, prompt_end: str) -> Reasoning:
    says_itself = form != "json_schema" and THOUGHT in text
    if not message.reasoning or says_itself or prompt_end.endswith(THOUGHT):
        return "none"
    return "open" if prompt_end.endswith(THINKS) else "may open"


def _given(message: generation_pb2.GenerateRequest) -> list[str]:
    return [name for name in _FORMS if getattr(message, name) or (name != "choices" and message.HasField(name))]
