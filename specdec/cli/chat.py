"""``specdec chat``: a conversation on the terminal."""

from __future__ import annotations

import asyncio
import functools
import sys
import time
from collections.abc import Callable
from typing import Annotated, Any

import typer
from rich.console import Console

from specdec.cli.display import MarkedText
from specdec.cli.secrets import TlsCa, TlsName, api_key, tls_of
from specdec.client import Client, Sample
from specdec.core.errors import SpecdecError
from specdec.v1 import generation_pb2

_COMMANDS = "/system TEXT  /reset  /exit"

Message = dict[str, str]


def chat(
    system: Annotated[str, typer.Option(help="first message, with the role system")] = "",
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="of an answer; default: the rest of the context")
    ] = None,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy; default: the server's")] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="default: drawn by the server for each answer")] = None,
    num_draft_tokens: Annotated[int | None, typer.Option(min=0, help="per round; default: the server's")] = None,
    no_speculation: Annotated[bool, typer.Option("--no-speculation", help="use the target alone")] = False,
    address: Annotated[str, typer.Option(help="host:port of the orchestrator")] = "127.0.0.1:50050",
    tls_ca: TlsCa = "",
    tls_name: TlsName = "orchestrator",
) -> None:
    """Talk to the model. Each answer streams, with accepted draft tokens marked; Ctrl-C ends an answer.

    Lines come from the terminal or a pipe. /system TEXT changes the system message, /reset forgets the conversation,
    /exit ends it. The environment variable SPECDEC_API_KEY has the API key, if the deployment needs one.
    """
    console = Console()
    fields = {
        "max_tokens": max_tokens,
        "temperature": temperature,
        "seed": seed,
        "num_draft_tokens": 0 if no_speculation else num_draft_tokens,
    }
    connect = functools.partial(Client, address, tls=tls_of(tls_ca), tls_name=tls_name, api_key=api_key())
    talk: list[Message] = []
    if console.is_terminal:
        console.print(_COMMANDS, style="dim", highlight=False)
    while (line := _line(console)) is not None:
        command, _, rest = line.partition(" ")
        if command == "/exit":
            break
        if command == "/reset":
            talk.clear()
        elif command == "/system":
            system = rest
        elif command.startswith("/"):
            console.print(f"There is no {command}; there are {_COMMANDS}", highlight=False, markup=False)
        elif line:
            talk.append({"role": "user", "content": line})
            first = [{"role": "system", "content": system}] if system else []
            answer = _answer(console, connect, {**fields, "chat": {"messages": [*first, *talk]}})
            if answer is None:
                talk.pop()
            else:
                talk.append({"role": "assistant", "content": answer})


def _line(console: Console) -> str | None:
    """The next line without spaces around it; None at the end."""
    try:
        return console.input("> ").strip() if console.is_terminal else _pipe_line()
    except (EOFError, KeyboardInterrupt):
        return None


def _pipe_line() -> str | None:
    line = sys.stdin.readline()
    return line.strip() if line else None


def _answer(console: Console, connect: Callable[[], Client], fields: dict[str, Any]) -> str | None:
    """The answer, up to an interruption; None: there is none, and the reason was printed."""
    sample, shown, started = Sample(), MarkedText(console, marks=console.is_terminal), time.monotonic()

    async def run() -> None:
        async with connect() as client:
            async for response in client.stream(**fields):
                if response.HasField("chunk"):
                    sample.add(response.chunk)
                    shown.show(sample)

    try:
        asyncio.run(run())
    except KeyboardInterrupt:
        pass
    except SpecdecError as error:
        shown.end()
        print(f"specdec: {error} [{error.reason}]", file=sys.stderr)
        return None
    shown.end()
    console.print(summary(sample, time.monotonic() - started), style="dim", highlight=False, markup=False)
    return sample.text


def summary(sample: Sample, seconds: float) -> str:
    """How long an answer was, how fast it came, and what speculation did, in at most 80 characters."""
    speculation, count = sample.finish.speculation, len(sample.token_ids)
    reason = generation_pb2.FinishReason.Name(sample.finish.reason).removeprefix("FINISH_REASON_").lower()
    parts = [f"{count} tokens", f"{count / max(seconds, 1e-9):.1f}/s"]
    if speculation.num_draft_tokens:
        parts.append(f"{speculation.num_accepted_tokens} of {speculation.num_draft_tokens} draft tokens accepted")
    parts.append(reason if sample.finished else "interrupted")
    return "[" + ", ".join(parts) + "]"
