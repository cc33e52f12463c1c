"""vLLM without our services as contenders, each in a process of its own (bench.engines.in_vllm)."""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

from bench.harness.runner import Answer, Request, Run
from bench.peers import before_end
from specdec.cli.processes import StartError, environment, python_command

_LINE_BYTES = 1 << 24
_STOP_TIMEOUT_S = 30.0
_TAIL_CHARACTERS = 2000


class Generator:
    """A running process."""

    def __init__(self, process: asyncio.subprocess.Process, log: IO[bytes], end_token_ids: Sequence[int]) -> None:
        self._process, self._log, self._end_token_ids = process, log, list(end_token_ids)

    async def ask(self, request: Request) -> Run:
        """Prompts of a window. Raises StartError if the process has ended."""
        assert request.window is not None
        prompts = [list(prompt["token_ids"]["token_ids"]) for prompt in request.prompts]
        asked = {
            "prompts": prompts,
            "max_tokens": [request.max_tokens_of(index) for index in range(len(prompts))],
            "end_token_ids": self._end_token_ids,
            **asdict(request.window),
        }
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(asked).encode() + b"\n")
        answered = await self.answer()
        texts = [(before_end(output["ids"], self._end_token_ids), output["is_cut"]) for output in answered["outputs"]]
        return Run(answered["seconds"], [Answer(text, is_cut=is_cut) for text, is_cut in texts])

    async def answer(self) -> Any:
        assert self._process.stdout is not None
        if line := await self._process.stdout.readline():
            return json.loads(line)
        raise StartError(f"vLLM has ended:\n{_tail(self._log)}")


def _tail(log: IO[bytes]) -> str:
    return Path(log.name).read_text(errors="replace")[-_TAIL_CHARACTERS:]


@asynccontextmanager
async def running(
    target: str, draft: str, how: str, threads: int, num_draft_tokens: int, *, end_token_ids: Sequence[int]
) -> AsyncIterator[Generator]:
    """vLLM with the model loaded. ``how``: alone, draft_model or ngram. Raises StartError."""
    command = python_command("bench.engines.in_vllm", target, draft, how)
    with tempfile.NamedTemporaryFile(prefix="specdec-vllm-", suffix=".log") as log:
        process = await asyncio.create_subprocess_exec(
            *(*command, str(threads), str(num_draft_tokens)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=log,
            env=environment(),
            limit=_LINE_BYTES,
            start_new_session=True,
        )
        generator = Generator(process, log, end_token_ids)
        try:
            await generator.answer()
            yield generator
        finally:
            await _stop(process)


async def _stop(process: asyncio.subprocess.Process) -> None:
    """The end of its input ends it, and its workers with it."""
    assert process.stdin is not None
    process.stdin.close()
    try:
        await asyncio.wait_for(process.wait(), _STOP_TIMEOUT_S)
    except TimeoutError:
        process.kill()
        await process.wait()
