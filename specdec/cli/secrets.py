"""The command line's share of certificates and keys: the options of those who call, the commands that make some.

Knows flags and variables; refuses to know what is called.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import sys
from pathlib import Path
from typing import Annotated

import typer

from specdec.security import dev_ca as made
from specdec.security.tls import Tls

TlsCa = Annotated[str, typer.Option(envvar="SPECDEC_TLS_CA", help="certificates in PEM of whom to trust; none: no TLS")]
TlsCert = Annotated[
    str, typer.Option(envvar="SPECDEC_TLS_CERT", help="own certificate in PEM; model services want one")
]
TlsKey = Annotated[str, typer.Option(envvar="SPECDEC_TLS_KEY", help="its private key in PEM")]
TlsName = Annotated[
    str, typer.Option(help="name that the server's certificate must have; empty: the host of the address")
]
API_KEY = "SPECDEC_API_KEY"
"""The variable with the caller's API key. No flag: others would see it in the list of processes."""


def certificates(
    directory: Annotated[Path, typer.Argument(help="to make OWNER/{tls.crt,tls.key,ca.crt} in")],
    days: Annotated[float, typer.Option(help="that the certificates are valid")] = 90.0,
    name: Annotated[list[str] | None, typer.Option(help="further host name or address; may be repeated")] = None,
) -> None:
    """Make a development CA and certificates for target, draft, orchestrator and operator; again: renew them."""
    try:
        made.make(directory, days, name or [])
    except (OSError, ValueError) as error:
        print(f"specdec: {error}", file=sys.stderr)
        raise typer.Exit(1) from error
    for owner in made.OWNERS:
        print(directory / owner)


def key(
    name: Annotated[str, typer.Argument(help="whose key it is, for logs")],
    max_sequences: Annotated[int | None, typer.Option(min=1, help="samples at a time; default: no limit")] = None,
    tokens_per_minute: Annotated[int | None, typer.Option(min=1, help="prompt and output; default: no limit")] = None,
) -> None:
    """Make an API key: its token on standard error, this once; the line for api_keys_file on standard output."""
    token = f"sk-specdec-{secrets.token_urlsafe(32)}"
    line = {"name": name, "sha256": hashlib.sha256(token.encode()).hexdigest()}
    quotas = {"max_sequences": max_sequences, "tokens_per_minute": tokens_per_minute}
    print(json.dumps(line | {field: value for field, value in quotas.items() if value is not None}))
    print(token, file=sys.stderr)


def tls_of(ca: str, cert: str = "", key: str = "") -> Tls | None:
    """Of a caller's flags; None: in the clear. Ends the command, in words, if the files are no good."""
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
