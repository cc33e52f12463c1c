"""The small results that travel between the loop and the two models; nothing of how they travel.

One exchange with the target is a round (tree up, verdict down); one with the draft is an advance (what was
committed, up) answered by growths (nodes, down).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from specdec.core.tree import EMPTY_TREE, TokenTree


@dataclass(frozen=True, slots=True)
class Timings:
    """Where a verdict's time went at the target."""

    queue_us: int = 0
    pass_us: int = 0
    sample_us: int = 0
    rows: int = 0
    sequences: int = 0


@dataclass(frozen=True, slots=True)
class Round:
    """Verify ``tree``, which hangs from ``base``; then go on alone for ``run_on`` tokens at most, less those that came
    unasked while this was on its way. Of what is left of the tree by then the first ``max_nodes`` nodes; 0: all."""

    number: int
    base: int
    tree: TokenTree = EMPTY_TREE
    run_on: int = 0
    max_nodes: int = 0


@dataclass(frozen=True, slots=True)
class Features:
    """Hidden states of consecutive positions: ``hidden_size`` numbers a row, little-endian in ``dtype``."""

    dtype: str
    hidden_size: int
    num_rows: int
    data: bytes


@dataclass(frozen=True, slots=True)
class Verdict:
    """``accepted`` nodes of the round's tree (root downwards) and ``next_token`` are committed from ``base``.

    ``features`` are the root's, at position base - 1, and the accepted nodes'.
    """

    round: int
    base: int
    accepted: tuple[int, ...]
    next_token: int
    predictions: tuple[int, ...] = ()
    timings: Timings = field(default_factory=Timings)
    features: Features | None = None
    run_on: int = 0  # verdicts that follow and need not be asked for
    dropped: int = 0  # the next round, sent before this verdict, of whose tree nothing is left
    under_way: TokenTree | None = None  # what is verified next, as that round was sent before this verdict and stands


@dataclass(frozen=True, slots=True)
class Budget:
    """How much may be drafted until the next advance: new nodes, depth below base, nodes below in_flight, runners-up
    beside each new node."""

    max_nodes: int = 0
    max_depth: int = 0
    max_ahead: int = 0
    max_siblings: int = 0


@dataclass(frozen=True, slots=True)
class Advance:
    """``token_ids`` were committed, which moved the base to ``base``; ``in_flight`` is being verified."""

    number: int
    base: int
    token_ids: tuple[int, ...] = ()
    in_flight: TokenTree = EMPTY_TREE
    budget: Budget = Budget()


class GrowthEnd(Enum):
    """Why a draft stopped growing."""

    BUDGET = "budget"
    CONTEXT = "context"
    UNLIKELY = "unlikely"
    SUPERSEDED = "superseded"


@dataclass(frozen=True, slots=True)
class Growth:
    """``tree`` hangs at the end of ``path``, which starts at ``base``. ``end`` is None while more follows."""

    advance: int
    base: int
    path: tuple[int, ...]
    tree: TokenTree
    end: GrowthEnd | None


TRANSFORMS = "transforms"
"""The capability of a target that knows all of SamplingParams. A draft needs none: it may propose what it likes."""

FEATURES = "features"
"""The capability of a target that returns hidden states."""

RUN_ON = "run_on"
"""The capability of a target that says how many verdicts follow unasked."""

EARLY = "early"
"""The capability of a target that takes a round before the verdict on the one before it."""

OVERRUN = 2
"""Verdicts that still come when a target which goes on unasked is told not to: of the pass that it is in, and of the
next, which answers that."""

AHEAD = "ahead"
"""The capability of a draft that grows below what is in flight."""

SIBLINGS = "siblings"
"""The capability of a draft that proposes runners-up beside its chain."""

CACHE_SALT = "cache_salt"
"""The capability of a model service that shares cached keys and values only between sequences with the same salt."""


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What a replica says of the model behind it."""

    name: str
    model_digest: str
    vocab_size: int
    tokenizer_fingerprint: str
    context_length: int
    dtype: str = "float32"
    capabilities: tuple[str, ...] = ()
    eos_token_ids: tuple[int, ...] = ()
    instance: str = ""  # of the process that serves it
    backend: str = ""  # what computes its passes; empty: it was not said


@dataclass(frozen=True, slots=True)
class Load:
    """What a replica has on its hands."""

    live_sequences: int = 0
    waiting_sequences: int = 0
    kv_slots_used: int = 0
    kv_slots_total: int = 0
    passes: int = 0
    open_streams: int = 0
    rows: int = 0  # of all passes so far; not told to peers
