"""``specdec models``: what is served."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Annotated, Any

import typer
from google.protobuf.json_format import MessageToDict

from specdec.cli.secrets import TlsCa, TlsName, api_key, tls_of
from specdec.client import Client
from specdec.core.errors import SpecdecError
from specdec.v1 import common_pb2, generation_pb2


def models(
    address: Annotated[str, typer.Option(help="host:port of the orchestrator")] = "127.0.0.1:50050",
    tls_ca: TlsCa = "",
    tls_name: TlsName = "orchestrator",
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
) -> None:
    """Show the models behind an orchestrator. The exit status is 1 if no target is ready.

    The environment variable SPECDEC_API_KEY has the API key, if the deployment needs one.
    """

    async def ask() -> generation_pb2.GetServerInfoResponse:
        async with Client(address, tls=tls_of(tls_ca), tls_name=tls_name, api_key=api_key()) as client:
            return await client.server_info()

    try:
        info = asyncio.run(ask())
    except SpecdecError as error:
        print(f"specdec: {error} [{error.reason}]", file=sys.stderr)
        raise typer.Exit(1) from error
    print(json.dumps(_as_dict(info)) if as_json else "\n".join(lines(info)))
    raise typer.Exit(int(not info.HasField("target")))


def lines(info: generation_pb2.GetServerInfoResponse) -> list[str]:
    """At most 80 characters each."""
    if not info.HasField("target"):
        return ["no target is ready"]
    shown = [info.model_name, *_described("target", info.target, info)]
    shown += _described("draft", info.draft, info) if info.HasField("draft") else ["  draft     none"]
    chat = "yes" if info.tokenizer.chat_template else "no, the model has no chat template"
    return [*shown, f"  chat      {chat if info.HasField('tokenizer') else 'no, there is no tokenizer'}"]


def _described(role: str, model: common_pb2.ModelInfo, info: generation_pb2.GetServerInfoResponse) -> list[str]:
    num = sum(replica.role == role and replica.ready for replica in info.replicas)
    backend = f", {model.backend}" if model.backend else ""
    chains = f", chains of {model.max_chain}" if model.max_chain else ""
    head = f", head {model.self_draft}" if model.self_draft else ""
    shown = [
        f"  {role:<9} {model.name}, {num} ready, {model.dtype}{backend}{head}, digest {model.model_digest[:12]}",
        f"            context {model.context_length}, vocabulary {model.vocab_size}{chains}",
    ]
    line = "           "
    for capability in model.capabilities:
        if len(line) + len(capability) > 78:
            shown.append(line)
            line = "           "
        line += f" {capability}"
    return [*shown, line] if line.strip() else shown


def _as_dict(info: generation_pb2.GetServerInfoResponse) -> dict[str, Any]:
    return MessageToDict(info, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
