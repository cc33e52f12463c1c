"""The measured pairs: tables that sleep, the damped pair with random weights, the bundled pair with trained weights.

Knows how each pair is served and prompted; does not know the comparisons.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from bench.models.damped_pair import Shape, damped_pair
from bench.peers.prompts import PromptSource
from specdec.cli.demo import MODELS
from specdec.speculation.acceptance import PRIOR

_VOCABULARY, _PROMPT_LENGTH = 4096, 64
"""The vocabulary and the prompt length of the bundled pair, in tokens."""


class PairName(StrEnum):
    table = "table"
    damped = "damped"
    bundled = "bundled"
    all = "all"


@dataclass(frozen=True, slots=True)
class TableCosts:
    """Costs of the table pair. ``pass_ms``: a target pass. ``row_us``: each row of it, a hundredth of a pass, so that
    trees are not free. ``step_ms``: a draft pass of any size. ``runner_up``: how often the second candidate is right if
    the first is wrong, as with real pairs (bench/LOG.md, 2026-11-22)."""

    pass_ms: float = 40.0
    step_ms: float = 4.0
    acceptance: float = 0.8
    runner_up: float = PRIOR[1]
    row_us: float = 400.0


Role = tuple[str, list[str]]
"""A service's module and flags."""


@dataclass(frozen=True, slots=True)
class Pair:
    """A pair. ``stranger`` is a draft that has nothing in common with the target. ``fixed`` has the numbers of draft
    tokens to compare.

    ``computes``: each model needs a core, and its distributions are real. ``prompt`` takes the stream and the seed.
    """

    name: PairName
    label: str
    target: Role
    draft: Role
    stranger: Role | None
    fixed: tuple[int, ...]
    computes: bool
    prompt: Callable[[int, int], list[int]]


def make(name: PairName, directory: Path, costs: TableCosts, dtype: str = "auto") -> Pair:
    """The pair ``name``, with weights in ``dtype``. Generates checkpoints in ``directory`` if needed, in seconds."""
    if name is PairName.table:
        return _tables(costs)
    if name is PairName.damped:
        return _damped(directory, dtype)
    return _bundled(dtype)


def _tables(costs: TableCosts) -> Pair:
    step, guesses = f"--pass-ms={costs.step_ms}", [f"--acceptance={costs.acceptance}", f"--runner-up={costs.runner_up}"]
    return Pair(
        PairName.table,
        f"table pair: a target pass of {costs.pass_ms:g} ms and {costs.row_us:g} us a row, a draft step of"
        f" {costs.step_ms:g} ms for any number of nodes; {costs.acceptance:g} of the first candidates are right,"
        f" and {costs.runner_up:g} of the second ones if the first is wrong",
        ("testing.table_service target", [f"--pass-ms={costs.pass_ms}", f"--row-us={costs.row_us}", *guesses]),
        ("testing.table_service draft", [step, *guesses]),
        ("testing.table_service draft", [step, "--acceptance=0", "--runner-up=0"]),
        (4, 6, 8),
        computes=False,
        prompt=_three_ids,
    )


def _damped(directory: Path, dtype: str) -> Pair:
    made = damped_pair(directory)
    # The same shape with another seed has unrelated weights.
    stranger = damped_pair(directory, Shape(seed=1))
    return Pair(
        PairName.damped,
        f"damped pair: random weights, a model of costs and not of text; dtype {dtype}",
        _served("target_service", made.target, dtype),
        _served("draft_service", made.draft, dtype),
        _served("draft_service", stranger.draft, dtype),
        (3, 4, 6, 8),
        computes=True,
        prompt=_three_ids,
    )


def _bundled(dtype: str) -> Pair:
    def prompt(stream: int, seed: int) -> list[int]:
        source = PromptSource.of_bundled(MODELS, _VOCABULARY, seed=1000 * seed + stream)
        return source.take(1, _PROMPT_LENGTH)[0]

    return Pair(
        PairName.bundled,
        f"bundled pair: small models of Python source, held-out text; dtype {dtype}",
        _served("target_service", MODELS / "target", dtype),
        _served("draft_service", MODELS / "draft", dtype),
        None,
        (2, 4, 6),
        computes=True,
        prompt=prompt,
    )


def _served(module: str, model: Path, dtype: str) -> Role:
    return module, [f"--model={model}", f"--dtype={dtype}", "--threads=1", "--kv-slots=16384"]


def _three_ids(stream: int, seed: int) -> list[int]:
    return [1 + stream, 2 + seed, 3]
