"""Certificates and API keys on the command line: options of callers, and commands that make certificates and keys."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import sys
from pathlib import Path
from typing import Annotated

import typer

from specdec.security import dev_ca
from specdec.security.tls import Tls

TlsCa = Annotated[str, typer.Option(envvar="SPECDEC_TLS_CA", help="PEM file of trusted CAs; empty: no TLS")]
TlsCert = Annotated[
    str, typer.Option(envvar="SPECDEC_TLS_CERT", help="PEM file of its certificate; model services require one")
]
TlsKey = Annotated[str, typer.Option(envvar="SPECDEC_TLS_KEY", help="PEM file of its private key")]
TlsName = Annotated[
    str, typer.Option(help="DNS name that the server's certificate must have; empty: the host of the address")
]
API_KEY = "SPECDEC_API_KEY"
"""The environment variable with the caller's API key. It is no flag, because other users can read process lists."""


def certificates(
    directory: Annotated[Path, typer.Argument(help="directory for OWNER/{tls.crt,tls.key,ca.crt}")],
    days: Annotated[float, typer.Option(help="validity of the certificates in days")] = 90.0,
    name: Annotated[list[str] | None, typer.Option(help="further host name or address; may be repeated")] = None,
) -> None:
    """Make a development CA and certificates for the services, the gateway and an operator; renew what exists."""
    try:
        dev_ca.make(directory, days, name or [])
    except (OSError, ValueError) as error:
        print(f"specdec: {error}", file=sys.stderr)
        raise typer.Exit(1) from error
    for owner in dev_ca.OWNERS:
        print(directory / owner)


def key(
    name: Annotated[str, typer.Argument(help="name of the key's owner, for logs")],
    max_sequences: Annotated[int | None, typer.Option(min=1, help="concurrent samples; default: no limit")] = None,
    tokens_per_minute: Annotated[int | None, typer.Option(min=1, help="prompt and output; default: no limit")] = None,
    shared: Annotated[bool, typer.Option("--shared", help="share cached prompts with other keys of this kind")] = False,
    operator: Annotated[bool, typer.Option("--operator", help="show where replicas are, and their problems")] = False,
) -> None:
    """Make an API key. Prints its line for api_keys_file, and on standard error the token, which is stored nowhere."""
    token = f"sk-specdec-{secrets.token_urlsafe(32)}"
    line = {"name": name, "sha256": hashlib.sha256(token.encode()).hexdigest()}
    options = {"max_sequences": max_sequences, "tokens_per_minute": tokens_per_minute}
    marks = {"shared": shared or None, "operator": operator or None}
    print(json.dumps(line | {field: value for field, value in (options | marks).items() if value is not None}))
    print(token, file=sys.stderr)


def tls_of(ca: str, cert: str = "", key: str = "") -> Tls | None:
    """The certificates in a caller's flags; None for no TLS. Ends the command with a message if they are invalid."""
    if not (ca or cert or key):
        return None
    try:
        if not ca:
            raise ValueError("a certificate and a key need a CA, too (--tls-ca)")
        return Tls(ca, cert, key)
    except ValueError as error:
        print(f"specdec: {error}", file=sys.stderr)
        raise typer.Exit(2) from error


def api_key() -> str:
    return os.environ.get(API_KEY, "")
