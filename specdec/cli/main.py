"""The command line: arguments and exit codes. Runs the services as processes and imports none of them."""

from __future__ import annotations

import asyncio
import functools
import json
import os
import sys
from collections.abc import Coroutine
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from specdec.cli import demo as demo_
from specdec.cli import doctor as doctor_
from specdec.cli import doctor_report
from specdec.cli import up as up_
from specdec.cli.chat import chat
from specdec.cli.display import print_answer
from specdec.cli.fetch import fetch
from specdec.cli.health_probe import own_health
from specdec.cli.models import models
from specdec.cli.processes import StartError, environment, is_serving, python_command, until_signalled
from specdec.cli.secrets import TlsCa, TlsCert, TlsKey, TlsName, api_key, certificates, key, tls_of
from specdec.client import Client
from specdec.core.errors import SpecdecError
from specdec.core.sequence import Method
from specdec.planner.command import plan
from specdec.security.tls_diagnosis import tls_problem
from specdec.transport.wire import write_method
from specdec.v1 import generation_pb2

app = typer.Typer(
    help="Speculative decoding with the draft and the target model as separate gRPC services.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


class Role(StrEnum):
    target = "target"
    draft = "draft"
    orchestrator = "orchestrator"
    gateway = "gateway"


class Engine(StrEnum):
    torch = "torch"
    vllm = "vllm"


@app.command(context_settings=PASS_ON)
def serve(context: typer.Context, role: Annotated[str, typer.Argument(metavar="|".join(Role))]) -> None:
    """Run one service in the foreground. The service's own flags follow its role (see serve target --help)."""
    if role in ("--help", "-h"):  # in place of a role; after a role the flags are the service's own
        typer.echo(context.get_help())
        raise typer.Exit
    if role not in list(Role):
        raise typer.BadParameter(f"{role!r} is none of {', '.join(Role)}.", context, param_hint="role")
    module = f"{role}_service" if role in (Role.target, Role.draft) else role
    os.execve(sys.executable, python_command(module, *context.args), environment())


bench = typer.Typer(
    help="Run a benchmark. Needs a checkout. Comparisons take your models (--target, --draft, --head) or what is"
    " running (--url, --address); see bench tasks --help."
)
app.add_typer(bench, name="bench", no_args_is_help=True)
train = typer.Typer(help="Train what drafts for a target. Each has its own flags. Needs a checkout.")
app.add_typer(train, name="train", no_args_is_help=True)
ngram = typer.Typer(help="An n-gram model as a draft.")
app.add_typer(ngram, name="ngram", no_args_is_help=True)

BENCHES = {
    "micro.rounds": "Overhead of the message path, with models that take no time.",
    "peers": "Comparison with transformers.",
    "engines": "Comparison with vLLM, and of the engines.",
    "distance": "Speed with a distant draft.",
    "control": "Draft lengths in simulated deployments.",
    "load": "What drafting gives at growing load: of a pair of yours, or of table models.",
    "prefix": "Choice of targets by the prompts' beginning, next to one by load alone.",
    "priorities": "Interactive requests beside many batch requests: what each kind loses.",
    "never_slower": "Each method next to the target alone, by load and length of answers: the lowest ratio.",
    "capacity": "Clients within a time per token: a draft on the target's device, or on another.",
    "drafts": "What smaller and larger drafts of a target are worth.",
    "heads": "Tokens per pass of a target that drafts by itself.",
    "tasks": "Methods of drafting on tasks of a chat model.",
    "plan": "Predictions of specdec plan, compared with a deployment.",
    "differential": "Random requests with and without speculation, compared field by field.",
    "gateway": "What HTTP costs, compared with gRPC.",
}


def _add_module(group: typer.Typer, name: str, module: str, *, what: str) -> None:
    @group.command(name, help=what, context_settings=PASS_ON)
    def run(context: typer.Context) -> None:
        _exec_module(module, context.args)


for _module, _what in BENCHES.items():
    _add_module(bench, _module.rpartition(".")[2].replace("_", "-"), f"bench.{_module}", what=_what)
_add_module(app, "chaos", "bench.chaos", what="Break a deployment on purpose, row by row of the fault table.")
_add_module(ngram, "build", "draft_service.ngram_build", what="Count texts for a draft without a model.")
_add_module(
    train, "head", "models.training.heads.train", what="A head (EAGLE-3, Medusa, ReDrafter), on its target's texts."
)
_add_module(train, "draft", "models.training.distill", what="A small draft model, on the answers written for a head.")

for _command in (plan, fetch, chat, models, certificates, key):
    app.command()(_command)


@app.command()
def up(
    target: Annotated[str, typer.Option(help="checkpoint directory or hub id")] = str(demo_.MODELS / "target"),
    draft: Annotated[str, typer.Option(help="likewise, or file of specdec ngram build")] = str(demo_.MODELS / "draft"),
    head: Annotated[str | None, typer.Option(help="directory of a head of the target")] = None,
    no_draft: Annotated[bool, typer.Option("--no-draft", help="run the target alone, with prompt lookup")] = False,
    target_revision: Annotated[str, typer.Option(help="branch, tag or commit of the target's hub id")] = "",
    draft_revision: Annotated[str, typer.Option(help="branch, tag or commit of the draft's hub id")] = "",
    port: Annotated[int, typer.Option(help="port of the orchestrator")] = 50050,
    http_port: Annotated[
        int, typer.Option(min=0, max=65535, help="port of OpenAI's API over HTTP; 0: none, as with --certificates")
    ] = 8000,
    engine: Annotated[
        Engine | None, typer.Option(help="what runs both models; settings of vllm are variables (SPECDEC_VLLM__*)")
    ] = None,
    threads: Annotated[
        int, typer.Option(help="CPU threads of each model; default: half of the cores; 0: all usable cores")
    ] = max(1, (os.cpu_count() or 2) // 2),
    certificates_dir: Annotated[
        Path | None, typer.Option("--certificates", help="use TLS; directory of `specdec certificates`")
    ] = None,
    logs: Annotated[Path | None, typer.Option(help="directory of the logs; default: a temporary one")] = None,
) -> None:
    """Run all services on this machine until Ctrl-C.

    A service that needs a restart (exit status 3) is restarted. If a service ends in another way, all are stopped.
    """
    work = up_.run(
        Console(),
        target,
        None if no_draft else draft,
        head=head,
        revisions={"target": target_revision, "draft": draft_revision},
        arguments=[f"--threads={threads}", *([f"--engine={engine}"] if engine else [])],
        port=port,
        http_port=0 if certificates_dir else http_port,
        certificates=certificates_dir,
        logs=logs,
    )
    _run(until_signalled(work))


@app.command()
def demo(
    max_tokens: Annotated[int, typer.Option(min=1, help="tokens to generate")] = 160,
    num_draft_tokens: Annotated[int | None, typer.Option(min=0, help="per round; default: as many as pay")] = None,
    temperature: Annotated[
        float | None, typer.Option(min=0, help="0 is greedy; default: 0.7, then greedy", show_default=False)
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="seed for sampling")] = 7,
    question: Annotated[list[str] | None, typer.Option(help="ask this instead; may be repeated")] = None,
    offline: Annotated[bool, typer.Option("--offline", help="the pair in the repository, of Python source")] = False,
) -> None:
    """Ask a small chat model, fetched once, with and without speculation. Exit status 1 if the outputs differ."""
    console = Console()
    scene = demo_.Scene.bundled(num_draft_tokens) if offline else demo_.scene(console, question, num_draft_tokens)
    temperatures = demo_.TEMPERATURES if temperature is None else (temperature,)
    work = demo_.run(console, scene, max_tokens=max_tokens, temperatures=temperatures, seed=seed)
    identical = _run(until_signalled(work))
    raise typer.Exit(130 if identical is None else int(not identical))


@app.command()
def generate(
    prompt: str,
    as_chat: Annotated[bool, typer.Option("--chat", help="the prompt is a message; the answer follows it")] = False,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="default: the rest of the context")] = None,
    temperature: Annotated[float, typer.Option(help="0 is greedy")] = 1.0,
    top_p: Annotated[float | None, typer.Option()] = None,
    top_k: Annotated[int | None, typer.Option(min=0)] = None,
    min_p: Annotated[float | None, typer.Option()] = None,
    repetition_penalty: Annotated[float | None, typer.Option(help="for tokens in prompt or output; 1: off")] = None,
    presence_penalty: Annotated[float | None, typer.Option(help="for tokens in the output")] = None,
    frequency_penalty: Annotated[float | None, typer.Option(help="per occurrence in the output")] = None,
    logit_bias: Annotated[list[str] | None, typer.Option(help="ID=BIAS; may be repeated")] = None,
    min_tokens: Annotated[int | None, typer.Option(min=0, help="minimum length of the output")] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="default: drawn by the server")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="end before this text; may be repeated")] = None,
    verification: Annotated[Method, typer.Option()] = Method.COUPLED,
    num_draft_tokens: Annotated[int | None, typer.Option(min=0, help="per round; default: the server's")] = None,
    no_speculation: Annotated[bool, typer.Option("--no-speculation", help="use the target alone")] = False,
    address: Annotated[str, typer.Option(help="host:port of the orchestrator")] = "127.0.0.1:50050",
    tls_ca: TlsCa = "",
    tls_name: TlsName = "orchestrator",
    timeout_s: Annotated[float | None, typer.Option(help="deadline of the request in seconds")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object at the end")] = False,
) -> None:
    """Generate from a prompt and stream the text. On a terminal the draft's tokens are marked.

    The environment variable SPECDEC_API_KEY has the API key, if the deployment needs one.
    """
    fields: dict[str, Any] = {
        **({"chat": {"messages": [{"role": "user", "content": prompt}]}} if as_chat else {"text": prompt}),
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "min_p": min_p,
        "repetition_penalty": repetition_penalty,
        "presence_penalty": presence_penalty,
        "frequency_penalty": frequency_penalty,
        "logit_bias": dict(map(_bias, logit_bias or [])),
        "min_tokens": min_tokens,
        "seed": seed,
        "stop": stop or [],
        "verification": write_method(verification),
        "num_draft_tokens": 0 if no_speculation else num_draft_tokens,
    }
    _check_ranges(fields)
    connect = functools.partial(Client, address, tls=tls_of(tls_ca), tls_name=tls_name, api_key=api_key())
    _run(print_answer(connect, fields, timeout_s=timeout_s, as_json=as_json))


def _check_ranges(fields: dict[str, Any]) -> None:
    try:
        generation_pb2.GenerateRequest(**fields)
    except ValueError as error:  # a number outside the range of its field
        print(f"specdec: {error}", file=sys.stderr)
        raise typer.Exit(2) from error


@app.command()
def health(
    address: Annotated[
        str, typer.Argument(help="host:port of any service; default: the service of this container")
    ] = "",
    service: Annotated[str, typer.Option(help="health service; empty: ready to serve, liveness: alive")] = "",
    tls_ca: TlsCa = "",
    tls_cert: TlsCert = "",
    tls_key: TlsKey = "",
    tls_name: TlsName = "",
) -> None:
    """Ask a service whether it serves, for health probes of containers. The exit status is 0 if it does, 1 otherwise.

    Without an address the probe reads the service's own environment variables. It uses SPECDEC_HEALTH_PORT without TLS
    if that is set, else SPECDEC_PORT, where it expects a name of the service's certificate (SPECDEC_TLS_CERT).
    """
    if address:
        tls = tls_of(tls_ca, tls_cert, tls_key)
    else:
        try:
            address, tls, own_name = own_health(os.environ, lambda: tls_of(tls_ca, tls_cert, tls_key))
        except ValueError as error:
            print(f"specdec: {error}", file=sys.stderr)
            raise typer.Exit(2) from error
        tls_name = tls_name or own_name
    serving = _run(is_serving(address, service=service, tls=tls, tls_name=tls_name))
    if not serving and (problem := _run(tls_problem(address, tls, tls_name))):
        print(f"specdec: {address}: {problem}", file=sys.stderr)
    print("SERVING" if serving else "NOT_SERVING")
    raise typer.Exit(0 if serving else 1)


@app.command()
def doctor(
    address: Annotated[str, typer.Option(help="host:port of the orchestrator; its replicas are examined, too")] = (
        "127.0.0.1:50050"
    ),
    target: Annotated[str, typer.Option(help="host:port of further targets, comma-separated")] = "",
    draft: Annotated[str, typer.Option(help="host:port of further drafts, comma-separated")] = "",
    tls_ca: TlsCa = "",
    tls_cert: TlsCert = "",
    tls_key: TlsKey = "",
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
) -> None:
    """Examine a deployment and explain its problems. The exit status is 0 if there is none, 1 otherwise.

    The environment variable SPECDEC_API_KEY has the API key, if the deployment needs one.
    """
    targets, drafts = ([part.strip() for part in value.split(",") if part.strip()] for value in (target, draft))
    tls = tls_of(tls_ca, tls_cert, tls_key)
    visits, findings = _run(doctor_.examine(address, targets, drafts, tls=tls, api_key=api_key()))
    if as_json:
        print(json.dumps(doctor_report.as_dict(visits, findings)))
    else:
        print("\n".join(doctor_report.lines(visits, findings)))
    raise typer.Exit(int(any(finding.wrong for finding in findings)))


def _exec_module(module: str, arguments: list[str]) -> None:
    """Replace this process by a module, from any working directory. Raises typer.Exit if it needs a checkout."""
    if module.startswith(("bench", "models")) and not (Path(__file__).resolve().parents[2] / "bench").is_dir():
        print("specdec: this needs a checkout of the repository, installed with pip install -e", file=sys.stderr)
        raise typer.Exit(1)
    os.execve(sys.executable, python_command(module, *arguments), environment())


def _bias(text: str) -> tuple[int, float]:
    token_id, _, bias = text.partition("=")
    try:
        if (number := int(token_id)) >= 0:
            return number, float(bias)
    except ValueError:
        pass
    raise typer.BadParameter(f"{text!r} is not of the form ID=BIAS", param_hint="--logit-bias")


def _run(work: Coroutine[Any, Any, Any]) -> Any:
    try:
        return asyncio.run(work)
    except (SpecdecError, StartError) as error:
        reason = f" [{error.reason}]" if isinstance(error, SpecdecError) else ""
        print(f"specdec: {error}{reason}", file=sys.stderr)
        raise typer.Exit(1) from error
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


def main() -> None:
    app()


if __name__ == "__main__":
    main()
