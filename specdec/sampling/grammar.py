"""Grammars: which tokens may follow in an output that has to match one. By llguidance, which works on the CPU.

Imports no torch. A grammar is a caller's program, so each has a budget of time. Beyond it every sequence with this
grammar ends, and those of other callers continue.
"""

from __future__ import annotations

import concurrent.futures
import os
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import NamedTuple, TypeVar

from llguidance import LLMatcher, LLTokenizer
from llguidance._lib import LLParserLimits

from specdec.core.errors import InvalidArgument, SpecdecError

GRAMMAR_FIELD = "spec.sampling.grammar"
"""The field that a problem of a grammar names."""

_KEPT = 64
"""Compiled grammars that are kept for later outputs."""


class Budget(NamedTuple):
    """Processor time that a grammar may take at once, and what it earns by each call. Schemas of usual size take 0.1 ms
    for a mask, one with 400 optional properties takes 2.4 ms."""

    burst_s: float = 0.03
    call_s: float = 0.003


_LIMITS = LLParserLimits(verbose_errors=False)
"""Those of llguidance, of one mask and of the memory of a matcher. A schema with 400 properties needs most of them."""

NICENESS = 5
"""Of what compiles, a thread (on Linux it has one of its own) or a process: passes come first."""

_PAUSE_S = 0.005

T = TypeVar("T")


class Grammars:
    """The grammars of one model, compiled in a separate thread. They are kept by owner: how long a request takes
    does not tell one caller what another one asked for."""

    def __init__(
        self, tokenizer: str, vocab_size: int, end_token_ids: Sequence[int], budget: Budget | None = None
    ) -> None:
        """``tokenizer``: a tokenizer.json, its path or its text, which is read at once: some hundred milliseconds for
        large vocabularies. The model must have end tokens; a complete output ends with one."""
        self.origin = tokenizer, vocab_size, tuple(end_token_ids)
        """The constructor's arguments, for another process."""
        self._end_token_ids, self._budget = frozenset(end_token_ids), budget or Budget()
        self._tokenizer = LLTokenizer(tokenizer, n_vocab=vocab_size, eos_token=list(end_token_ids))
        self._kept: OrderedDict[tuple[bytes, str], Future[Compiled]] = OrderedDict()
        self._thread = ThreadPoolExecutor(1, "grammars", partial(os.nice, NICENESS))

    def start(self, grammar: str, owner: bytes) -> Future[Compiled] | None:
        """Compile a grammar, unless that was done for this owner. None: any output will do. Called by one thread
        alone."""
        if not grammar:
            return None
        key = owner, grammar
        if key not in self._kept:
            self._kept[key] = self._thread.submit(self.compiled, grammar)
            if len(self._kept) > _KEPT:
                self._kept.popitem(last=False)
        self._kept.move_to_end(key)
        return self._kept[key]

    def compiled(self, grammar: str) -> Compiled:
        """Takes some ten milliseconds for 32 KB. Raises InvalidArgument for a bad grammar."""
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0, limits=_LIMITS)
        first = matcher.deep_copy()
        compiled = Compiled(matcher, self._end_token_ids, self._budget)
        allows_any = any(compiled.timed(first.compute_bitmask))  # some grammars fail there
        if first.is_error() or not allows_any:
            problem = first.get_error() or "allows no output"
            raise InvalidArgument([(GRAMMAR_FIELD, " ".join(problem.split())[:500])])
        return compiled


def wait_for_any(compiling: Sequence[Future[Compiled]]) -> None:
    """For a moment: what a step does that has nothing else to do."""
    concurrent.futures.wait(compiling, _PAUSE_S, concurrent.futures.FIRST_COMPLETED)


class Compiled:
    """A grammar at the beginning of an output, and its budget."""

    def __init__(self, matcher: LLMatcher, end_token_ids: frozenset[int], budget: Budget) -> None:
        self.matcher, self.end_token_ids, self._budget = matcher, end_token_ids, budget
        self.problem: SpecdecError | None = None
        """Set once the budget is spent."""
        self._left_s = budget.burst_s
        self.call_s: float | None = None
        """Processor time of a call, on average over the last ones."""

    def mask(self) -> GrammarMask:
        return GrammarMask(self, self.matcher.deep_copy())

    def timed(self, call: Callable[[], T]) -> T:
        """The result of a call of a matcher, paid from the budget. Processor time of this thread: what else the machine
        does is not the grammar's."""
        started = time.thread_time()
        result = call()
        took_s = time.thread_time() - started
        self._left_s = min(self._budget.burst_s, self._left_s + self._budget.call_s - took_s)
        self.call_s = took_s if self.call_s is None else self.call_s + (took_s - self.call_s) / 8
        if self._left_s < 0.0 and self.problem is None:
            self.problem = InvalidArgument([(GRAMMAR_FIELD, "takes too long to match: it is ambiguous or too complex")])
        return result


class GrammarMask:
    """See specdec.sampling.logits_processors.Mask. Behind an end token everything is allowed: it is not part of the
    output.

    A matcher moves forward only. llguidance does not come back to where it was: after a mask and a rollback, later
    masks may be those of the text that was taken back. A copy takes 2 us.
    """

    def __init__(self, compiled: Compiled, matcher: LLMatcher, has_ended: bool = False) -> None:
        self._compiled, self._matcher, self._has_ended = compiled, matcher, has_ended

    def copy(self) -> GrammarMask:
        return GrammarMask(self._compiled, self._matcher.deep_copy(), self._has_ended)

    def advance(self, token_id: int) -> bool:
        if self._has_ended or (token_id in self._compiled.end_token_ids and self._matcher.is_accepting()):
            self._has_ended = True
            return True
        if self._compiled.problem is not None:
            return False
        return self._compiled.timed(lambda: self._matcher.try_consume_tokens([token_id])) == 1

    def allowed(self) -> bytes | None:
        if self._has_ended:
            return None
        if self._compiled.problem is None:
            bits = self._compiled.timed(self._matcher.compute_bitmask)
            if not self._matcher.is_error():
                return bits
        return b""

    def forced(self) -> list[int]:
        """The tokens that have to follow; they may be written in other tokens."""
        if self._has_ended or self._compiled.problem is not None or self._matcher.is_stopped():
            return []
        return self._compiled.timed(self._matcher.compute_ff_tokens)

    @property
    def problem(self) -> SpecdecError | None:
        if self._matcher.is_error():
            return InvalidArgument([(GRAMMAR_FIELD, "is too complex at this place of the output")])
        return self._compiled.problem

    @property
    def call_s(self) -> float:
        return self._compiled.call_s or 0.0
