"""Compose files as Compose reads them, as far as ours go: variables replaced, overlays laid over what is below."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from tests.checkout import ROOT

BASE = ROOT / "docker-compose.yml"
GPU = ROOT / "deploy/compose/gpu.yml"
FILES = [BASE, *sorted((ROOT / "deploy/compose").glob("*.yml"))]
PAIR = {"TARGET_MODEL": "large", "DRAFT_MODEL": "small"}
"""What gpu.yml cannot do without."""

_VARIABLE = re.compile(r"\$\{(?P<name>\w+)(?::(?P<how>[-?+])(?P<word>[^}]*))?\}")


class MissingVariableError(Exception):
    pass


def variables(file: Path) -> set[str]:
    return {match["name"] for match in _VARIABLE.finditer(file.read_text())}


def load(*files: Path, **environment: str) -> dict[str, Any]:
    """The merged files, with these variables."""
    merged: dict[str, Any] = {}
    for file in files:
        merged = _over(merged, _replaced(yaml.safe_load(file.read_text()), environment))
    return merged


def _replaced(value: Any, environment: Mapping[str, str]) -> Any:
    if isinstance(value, dict):
        return {key: _replaced(each, environment) for key, each in value.items()}
    if isinstance(value, list):
        return [_replaced(each, environment) for each in value]
    if isinstance(value, str):
        return _VARIABLE.sub(lambda match: _value(match, environment), value)
    return value


def _value(match: re.Match[str], environment: Mapping[str, str]) -> str:
    value = environment.get(match["name"], "")
    if match["how"] == "+":
        return match["word"] if value else ""
    if match["how"] == "?" and not value:
        raise MissingVariableError(match["name"])
    return value or (match["word"] if match["how"] == "-" else "")


def _over(below: Any, above: Any) -> Any:
    if isinstance(below, dict) and isinstance(above, dict):
        return {**below, **{key: _over(below[key], value) if key in below else value for key, value in above.items()}}
    if isinstance(below, list) and isinstance(above, list):
        return below + above
    return above
