"""Runs a benchmark from a shell: the flags that all of them share, and signals. Does not know the measurements."""

from __future__ import annotations

import inspect
import signal
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, fields
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import httpx2 as httpx
import typer

from bench.harness.endpoints import Endpoint, OverGrpc, OverHttp
from bench.harness.models import Models, PairName, pair_of
from bench.harness.questions import NAMES, Question, read_questions
from specdec.cli.processes import StartError
from specdec.cli.secrets import api_key, tls_of
from specdec.client import Client


class Dtype(StrEnum):
    """The data type of weights."""

    bfloat16 = "bfloat16"
    float32 = "float32"


def _of_models(metavar: str, what: str, envvar: str | None = None) -> Any:
    return typer.Option(metavar=metavar, help=what, envvar=envvar, rich_help_panel="What is measured")


def _of_questions(metavar: str, what: str, minimum: int | None = None) -> Any:
    return typer.Option(metavar=metavar, help=what, min=minimum, rich_help_panel="What is asked")


def _of_results(what: str) -> Any:
    return typer.Option(metavar="FILE", help=what, rich_help_panel="Results")


@dataclass(frozen=True, slots=True, kw_only=True)
class Common:
    """The flags of every benchmark that compares methods, loads or engines."""

    target: Annotated[str | None, _of_models("MODEL", "checkpoint directory or hub id")] = None
    draft: Annotated[list[str] | None, _of_models("MODEL", "likewise, or an n-gram file; may be repeated")] = None
    head: Annotated[list[str] | None, _of_models("DIRECTORY", "a head of the target; may be repeated")] = None
    pair: Annotated[PairName | None, _of_models("NAME", f"models by name instead: {', '.join(PairName)}")] = None
    url: Annotated[str | None, _of_models("URL", "a running gateway instead")] = None
    address: Annotated[str | None, _of_models("HOST:PORT", "a running orchestrator instead")] = None
    tls_ca: Annotated[str, _of_models("FILE", "CAs of what is running (PEM)", "SPECDEC_TLS_CA")] = ""
    threads: Annotated[int, _of_models("N", "CPU threads of each model")] = 2
    dtype: Annotated[Dtype | None, _of_models("TYPE", "bfloat16 or float32; default: what suits the device")] = None
    questions: Annotated[str | None, _of_questions("NAME", ", ".join(NAMES))] = None
    per_task: Annotated[int | None, _of_questions("N", "questions of each task at most", 1)] = None
    turns: Annotated[int | None, _of_questions("N", "turns of a question at most; default: all", 1)] = None
    tokens: Annotated[int | None, _of_questions("N", "tokens of an answer at most", 2)] = None
    temperature: Annotated[list[float] | None, _of_questions("T", "0: greedy; may be repeated", 0)] = None
    json: Annotated[Path | None, _of_results("write the figures to a file")] = None
    chart: Annotated[Path | None, _of_results("draw them into a file, such as figures.png or .svg")] = None

    @property
    def is_running(self) -> bool:
        """Whether a running deployment is measured."""
        return self.url is not None or self.address is not None

    def models(self, default: PairName, directory: Path) -> Models:
        """Those of the flags, else the pair ``default``, which may be made in ``directory``. Raises StartError."""
        if self.target is None:
            return pair_of(self.pair or default, directory)
        return Models(self.target, self.target, tuple(self.draft or ()), tuple(self.head or ()))

    def models_of_both(self, default: PairName, directory: Path) -> Models:
        """The same, for a comparison with something that runs here. Raises StartError if the running deployment's
        target is not named."""
        if self.is_running and self.target is None:
            raise StartError("next to a running deployment this needs its model, too: --target")
        return self.models(default, directory)

    def asked(self, default: str = "builtin", per_task: int | None = None) -> list[Question]:
        """Raises ValueError for questions that cannot be read."""
        return read_questions(self.questions or default, self.per_task or per_task, self.turns)

    @asynccontextmanager
    async def endpoint(self) -> AsyncIterator[Endpoint]:
        """The running deployment. The environment variable SPECDEC_API_KEY has the API key, if it needs one."""
        if self.address is not None:
            async with Client(self.address, tls=tls_of(self.tls_ca), api_key=api_key()) as client:
                yield OverGrpc(client)
            return
        headers = {"Authorization": f"Bearer {api_key()}"} if api_key() else {}
        url = (self.url or "").rstrip("/").removesuffix("/v1")
        async with httpx.AsyncClient(base_url=url, headers=headers, timeout=None, verify=self.tls_ca or True) as http:
            yield OverHttp(http)

    def refuse_contradictions(self) -> None:
        """Raises typer.BadParameter."""
        deployed = [flag for flag, value in (("--url", self.url), ("--address", self.address)) if value is not None]
        chosen = [flag for flag, value in (("--target", self.target), ("--pair", self.pair)) if value is not None]
        if len(deployed) > 1 or len(chosen) > 1:
            raise typer.BadParameter(f"one of {' and '.join(deployed if len(deployed) > 1 else chosen)}, not both")
        if self.target is None and (self.draft or self.head):
            raise typer.BadParameter("--draft and --head need a --target")
        if self.pair is not None and self.is_running:
            raise typer.BadParameter(f"{deployed[0]} names a running deployment, --pair models to be started")


def with_common_flags(main: Callable[..., None], without: Sequence[str] = ()) -> Callable[..., None]:
    """``main``, with a flag for each field of its first parameter, a Common, but those ``without`` a use in it."""
    hints = get_type_hints(Common, include_extras=True)
    shared = [
        inspect.Parameter(flag.name, inspect.Parameter.KEYWORD_ONLY, default=flag.default, annotation=hints[flag.name])
        for flag in fields(Common)
        if flag.name not in without
    ]
    _, *special = inspect.signature(main, eval_str=True).parameters.values()

    def run(**values: Any) -> None:
        common = Common(**{flag.name: values.pop(flag.name) for flag in shared})
        common.refuse_contradictions()
        main(common, **values)

    run.__doc__ = main.__doc__
    of_main = [flag.replace(kind=inspect.Parameter.KEYWORD_ONLY) for flag in special]
    run.__signature__ = inspect.Signature([*of_main, *shared])  # type: ignore[attr-defined]
    run.__annotations__ = {}
    return run


def run_comparison(main: Callable[..., None], *without: str) -> None:
    """Run ``main``, with a Common as its first parameter, with its command-line flags but those ``without`` a use."""
    run_benchmark(with_common_flags(main, without))


def run_benchmark(main: Callable[..., None], command: str = "") -> None:
    """Run ``main`` with its command-line flags. SIGTERM acts like Ctrl-C, so the services of the benchmark also end.

    ``command``: as the user types it; default: ``specdec bench`` and the module's name.
    """
    # By Ctrl-C's own signal, which asyncio handles: an exception out of any place could be lost in a callback.
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(main)
    app(prog_name=command or f"specdec bench {_name()}")


def _name() -> str:
    """That of the command: of the module ``bench.NAME`` or ``bench.NAME.__main__`` that runs."""
    file = Path(sys.argv[0])
    return (file.parent.name if file.stem == "__main__" else file.stem).replace("_", "-")
