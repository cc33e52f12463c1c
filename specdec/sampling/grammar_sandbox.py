"""Reads and compiles grammars of callers in other processes, before a process that others share does.

A grammar is a caller's program: it may overflow the stack of its compiler, take all memory or never end. A child has
limits for the three, and its death is an answer.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from llguidance import LLMatcher

from specdec.core.errors import InvalidArgument, Overloaded
from specdec.core.limits import MAX_GRAMMAR_BYTES
from specdec.sampling.grammar import NICENESS, Grammars

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

log = logging.getLogger(__name__)

NUM_CHILDREN = 2

_CPU_S, _WALL_S = 0.5, 10.0
"""Of one grammar. The second one is for a machine without time."""

_MEMORY_BYTES = 512 << 20
"""That a grammar may take in addition to the tokenizer."""

_STACK_BYTES = 2 << 20
"""Less than what the threads of services have: what fits here fits there."""

_SPACES: JsonCompileOptions = {"whitespace_pattern": r"[\x20\n\r\t]{0,16}"}
"""Between the parts of JSON: without a bound, weak models write spaces for ever. A schema's x-guidance overrides it."""

Reasoning = Literal["none", "open", "may open"]
"""What the output may have before it matches a grammar: nothing, the rest of a reasoning, or a whole one."""

_THOUGHT = 'thought[suffix="</think>"]: /(.|\\n)*/'
_STARTS: dict[Reasoning, str] = {
    "open": "start: thought /\\n{0,2}/ @answer",
    "may open": 'start: ("<think>" thought /\\n{0,2}/)? @answer',
}

FORMATS = ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid")
"""Of strings in JSON schemas, that llguidance knows."""

_DATA = ("const", "enum", "default", "example", "examples")
"""Keys of a schema with values that are no schemas."""

_BY_NAME = ("properties", "patternProperties", "dependentSchemas", "$defs", "definitions")
"""Keys with schemas by name."""

_TOO_LARGE = "takes too much time, memory or depth to compile"


class GrammarSandbox:
    """Children for one model. A child is started before it is needed, and replaced once it has died."""

    def __init__(self, tokenizer: str, vocab_size: int, end_token_ids: Sequence[int]) -> None:
        """As of specdec.sampling.grammar.Grammars; ``tokenizer`` is a path."""
        self._origin = [tokenizer, str(vocab_size), *map(str, end_token_ids)]
        self._threads = ThreadPoolExecutor(NUM_CHILDREN, "grammars of callers")
        self._children = {_Child(self._origin) for _ in range(NUM_CHILDREN)}
        self._idle: asyncio.Queue[_Child] = asyncio.Queue()
        for child in self._children:
            self._idle.put_nowait(child)

    async def checked(self, form: str, text: str, reasoning: Reasoning = "none") -> str:
        """The grammar in llguidance's form, behind reasoning. Raises InvalidArgument that names ``form``, which is one
        of json_schema, regex, choices (a list in JSON) and grammar (in Lark's form). Raises Overloaded if the machine
        has no time or memory for a child."""
        child, answer = await self._idle.get(), None
        try:
            async with asyncio.timeout(_WALL_S):
                asked = partial(child.ask, {"form": form, "text": text, "reasoning": reasoning})
                answer = await asyncio.get_running_loop().run_in_executor(self._threads, asked)
        except OSError as error:  # a TimeoutError too
            log.warning("a child that reads grammars was lost", extra={"problem": repr(error)})
            raise Overloaded("grammars cannot be read at the moment") from error
        finally:
            if answer is None or child.is_dead:  # its answer to this caller would be taken for the next one's
                self._end(child)
                self._children.add(child := _Child(self._origin))
            self._idle.put_nowait(child)
        if "problem" in answer:
            raise InvalidArgument([(form, answer["problem"])])
        return str(answer["grammar"])

    def _end(self, child: _Child) -> None:
        self._children.remove(child)
        child.kill()
        self._threads.submit(child.release)  # behind the caller that waits for its answer

    async def close(self) -> None:
        for child in list(self._children):
            self._end(child)
        await asyncio.to_thread(self._threads.shutdown)


class _Child:
    """Not by asyncio: uvloop forks, and what gRPC does in a forked process may crash it."""

    def __init__(self, origin: Sequence[str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, *origin],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )

    @property
    def is_dead(self) -> bool:
        return self._process.poll() is not None

    def ask(self, question: dict[str, str]) -> dict[str, str]:
        """The answer; that it is too large, if the child has died of the question. Raises OSError if something else
        ended the child."""
        given, taken = self._process.stdin, self._process.stdout
        assert given is not None
        assert taken is not None
        given.write(json.dumps(question).encode() + b"\n")
        given.flush()
        line = taken.readline()
        if line.endswith(b"\n"):
            answer: dict[str, str] = json.loads(line)
            return answer
        if self._process.wait() == -signal.SIGKILL:
            raise OSError("killed, as by the kernel where memory is short")
        return {"problem": _TOO_LARGE}

    def kill(self) -> None:
        self._process.kill()

    def release(self) -> None:
        with suppress(OSError), self._process:  # its end waits for the process
            pass


def _answer(grammars: Grammars, form: str, text: str, reasoning: Reasoning) -> dict[str, str]:
    try:
        grammar = _read(form, text)
        if reasoning != "none":
            grammar = _behind(_STARTS[reasoning], grammar)
        if len(grammar.encode()) > MAX_GRAMMAR_BYTES:
            return {"problem": f"at most {MAX_GRAMMAR_BYTES} bytes as llguidance writes it"}
        grammars.compiled(grammar)
    except InvalidArgument as error:
        return {"problem": error.violations[0][1]}
    return {"grammar": grammar}


def _read(form: str, text: str) -> str:
    if form == "json_schema":
        try:
            return LLMatcher.grammar_from_json_schema(_without_other_formats(text), defaults=_SPACES)
        except ValueError as error:
            raise InvalidArgument([(form, f"is not JSON: {error}")]) from error
    if form == "regex":
        return LLMatcher.grammar_from_regex(text)
    if form == "choices":
        choices = (json.dumps(choice, ensure_ascii=False) for choice in json.loads(text))
        return LLMatcher.grammar_from_lark(f"start: {' | '.join(choices)}")
    return LLMatcher.grammar_from_lark(text)


def _behind(start: str, grammar: str) -> str:
    """A grammar in Lark's form that goes on with another one, its @answer."""
    answer, *others = json.loads(grammar)["grammars"] if grammar.startswith("{") else [{"lark_grammar": grammar}]
    first = {"name": "reasoning", "lark_grammar": f"{start}\n{_THOUGHT}"}
    return json.dumps({"grammars": [first, {**answer, "name": "answer"}, *others]})


def _without_other_formats(schema: str) -> str:
    """A schema without the formats that no grammar stands for. JSON Schema calls a format an annotation."""
    if '"format"' not in schema:
        return schema
    try:
        value = json.loads(schema)
    except (ValueError, RecursionError):
        return schema  # llguidance says what is wrong
    inner, changes = [value], False
    while inner:
        part = inner.pop()
        if isinstance(part, dict):
            if isinstance(form := part.get("format"), str) and form not in FORMATS:
                del part["format"]
                changes = True
            for key, item in part.items():
                if key in _BY_NAME and isinstance(item, dict):
                    inner += item.values()
                elif key not in _DATA:
                    inner.append(item)
        elif isinstance(part, list):
            inner += part
    return json.dumps(value) if changes else schema


def main() -> None:
    """A child: answers questions, a line of JSON each, until its input ends."""
    os.nice(NICENESS)
    tokenizer, vocab_size, *end_token_ids = sys.argv[1:]
    grammars = Grammars(tokenizer, int(vocab_size), [*map(int, end_token_ids)])
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + _MEMORY_BYTES, resource.RLIM_INFINITY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    threading.stack_size(_STACK_BYTES)
    thread = threading.Thread(target=_serve, args=(grammars,))
    thread.start()
    thread.join()


def _serve(grammars: Grammars) -> None:
    for line in sys.stdin:
        signal.setitimer(signal.ITIMER_PROF, _CPU_S)  # its signal ends the process
        answer = _answer(grammars, **json.loads(line))
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
