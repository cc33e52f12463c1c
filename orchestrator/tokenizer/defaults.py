"""Defaults of sampling: the contract's own, or those of a model's generation_config.json.

Knows the file's keys; does not know requests.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from specdec.core.sequence import SamplingParams
from specdec.runner.files import read_json
from specdec.transport.sampling_wire import sampling_problems

_KEYS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


@dataclass(frozen=True, slots=True)
class Defaults:
    """The values of absent fields. By default they change nothing."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    @staticmethod
    def read(file: Path | None) -> Defaults:
        """Those of a generation_config.json. Without sampling (do_sample false) the temperature is 0. Raises ValueError
        if a value is out of its range."""
        config = read_json(file)
        given: dict[str, Any] = {key: config[key] for key in _KEYS if config.get(key) is not None}
        if config.get("do_sample") is False:
            given["temperature"] = 0.0
        try:
            values = {key: int(value) if key == "top_k" else float(value) for key, value in given.items()}
            defaults = Defaults(**cast(dict[str, Any], values))
            problems = sampling_problems(SamplingParams(**{key: getattr(defaults, key) for key in _KEYS}), 0)
            if defaults.top_k < 0:
                problems.append(("top_k", f"must be at least 0, not {defaults.top_k}"))
        except (TypeError, ValueError, OverflowError) as error:
            raise ValueError(f"{file} has a value of another kind: {error}") from error
        if problems:
            raise ValueError(f"{file}: {problems[0][0]} {problems[0][1]}")
        return defaults
