"""The command line and the services' programs, called in this process: exit status, standard output and error."""

from __future__ import annotations

import asyncio
import importlib
import os
import sys
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO

import pytest
from typer.testing import CliRunner

from specdec.cli.main import app
from specdec.telemetry import setup as telemetry

TERMINAL = {"COLUMNS": "300", "NO_COLOR": "1", "TERM": "dumb"}

Answer = tuple[int, str, str]


def without_ours() -> dict[str, str]:
    """The environment without the variables that set a service."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("OTEL_", "SPECDEC_"))}


def invoke(*arguments: str, stdin: str = "", **environment: str) -> Answer:
    """``specdec ARGUMENTS``. Needs a thread without a running event loop."""
    unset = dict.fromkeys(os.environ.keys() - without_ours().keys())
    ran = CliRunner(env={**unset, **TERMINAL, **environment}).invoke(app, arguments, stdin)
    assert ran.exception is None or isinstance(ran.exception, SystemExit), ran.exception
    return ran.exit_code, ran.stdout, ran.stderr


async def called(*arguments: str, stdin: str = "", **environment: str) -> Answer:
    """The same beside services of this event loop."""
    return await asyncio.to_thread(invoke, *arguments, stdin=stdin, **environment)


def program(module: str, *arguments: str) -> Answer:
    """``python -m MODULE ARGUMENTS`` of a service that ends before it serves."""
    out, err = StringIO(), StringIO()
    with pytest.MonkeyPatch.context() as patched, redirect_stdout(out), redirect_stderr(err):
        for name in os.environ.keys() - without_ours().keys():
            patched.delenv(name)
        patched.setenv("GOMP_SPINCOUNT", "0")  # which a service would set for the whole process
        patched.setattr(telemetry, "set_up", lambda *_: None)
        patched.setattr(sys, "argv", [module, *arguments])
        with pytest.raises(SystemExit) as ended:
            importlib.import_module(f"{module}.__main__").main()
    return int(ended.value.code or 0), out.getvalue(), err.getvalue()
