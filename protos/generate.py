"""Generates specdec/v1 from protos/ (``make protos``). Needs grpcio-tools; nothing imports this at run time."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.metadata import distribution
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def generate(output: Path) -> None:
    """Write the modules of every contract file below ``output``. Raises RuntimeError if protoc fails."""
    from grpc_tools import protoc

    files = sorted(str(file.relative_to(ROOT / "protos")) for file in (ROOT / "protos").rglob("*.proto"))
    # google/rpc/status.proto is in this package, the well-known types are in grpcio-tools.
    includes = [ROOT / "protos", Path(str(distribution("googleapis-common-protos").locate_file(""))), _well_known()]
    arguments = [
        "protoc",
        *(f"-I{include}" for include in includes),
        *(f"--{kind}_out={output}" for kind in ("python", "pyi", "grpc_python")),
        *files,
    ]
    if protoc.main(arguments) != 0:
        raise RuntimeError("protoc failed")


def _well_known() -> Path:
    import grpc_tools

    return Path(str(grpc_tools.__file__)).parent / "_proto"


def main(arguments: Sequence[str] = ()) -> None:
    generate(Path(arguments[0]) if arguments else ROOT)


if __name__ == "__main__":
    main(sys.argv[1:])
