"""The values exchanged between the decoding loop and the two models. Does not know how they are transported.

One exchange with the target is a round (tree up, verdict down). One exchange with the draft is an advance (committed
tokens up), answered by growths (nodes down).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from specdec.core.sequence import SequenceSpec
from specdec.core.tree import EMPTY_TREE, TokenTree


@dataclass(frozen=True, slots=True)
class TargetOpen:
    """A sequence to open at a target, and what it is asked for. ``stop_token_ids`` end autonomous decoding."""

    spec: SequenceSpec
    stop_token_ids: frozenset[int] = frozenset()
    age_s: float = 0.0  # of the request; a replay keeps it
    num_preemptions: int = 0  # of this sequence so far, on any target
    num_logprobs: int | None = None  # most likely tokens next to each token; None: no logprobs
    num_prompt_logprobs: int | None = None
    max_self_draft_nodes: int = 0  # see Round.self_draft_nodes
    adapter: str = ""  # of the target's, applied to the model; empty: none


@dataclass(frozen=True, slots=True)
class Timings:
    """Times that the target spent on a verdict, and the size of its pass."""

    queue_us: int = 0
    pass_us: int = 0
    sample_us: int = 0
    rows: int = 0
    sequences: int = 0
    self_draft_us: int = 0  # drafting by the target itself


@dataclass(frozen=True, slots=True)
class Round:
    """Verify ``tree`` at ``base``, then decode autonomously for at most ``num_autonomous`` tokens. Autonomous tokens
    decoded meanwhile count against these. Of the tree that they leave, the first ``max_nodes`` nodes count (0: all).
    ``self_draft_nodes``: at most, of a tree that the target drafts itself where it has none to verify."""

    number: int
    base: int
    tree: TokenTree = EMPTY_TREE
    num_autonomous: int = 0
    max_nodes: int = 0
    self_draft_nodes: int = 0


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Log-softmax of the target's own logits at consecutive positions: of each token, and of the ``num_top`` most
    likely ones. The latter are flat, position after position, the most likely first; of equal ones the lowest id first.
    """

    logprobs: Sequence[float]
    top_ids: Sequence[int] = ()
    top_logprobs: Sequence[float] = ()

    def __len__(self) -> int:
        return len(self.logprobs)

    @staticmethod
    def joined(parts: Sequence[Logprobs]) -> Logprobs:
        """Those of consecutive parts."""
        chain = itertools.chain.from_iterable
        return Logprobs(
            list(chain(part.logprobs for part in parts)),
            list(chain(part.top_ids for part in parts)),
            list(chain(part.top_logprobs for part in parts)),
        )

    @property
    def num_top(self) -> int:
        return len(self.top_ids) // len(self.logprobs) if self.logprobs else 0

    def part(self, start: int, stop: int) -> Logprobs:
        """Those of the positions from ``start`` to ``stop``."""
        top = slice(start * self.num_top, stop * self.num_top)
        return Logprobs(self.logprobs[start:stop], self.top_ids[top], self.top_logprobs[top])


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Those of consecutive tokens of a prompt, the first of which is at ``position``. They come before the verdict on
    an open. The first token of a prompt has none."""

    position: int
    logprobs: Logprobs


@dataclass(frozen=True, slots=True)
class Verdict:
    """The target's decision: from ``base`` on it commits the ``accepted`` nodes of the round's tree (root downwards),
    then ``next_token``. ``logprobs``: of the committed tokens, if requested."""

    round: int
    base: int
    accepted: tuple[int, ...]
    next_token: int
    timings: Timings = field(default_factory=Timings)
    num_autonomous_left: int = 0  # autonomous verdicts that follow
    dropped_round: int = 0  # number of the next round in flight if this verdict leaves nothing of its tree
    refused: bool = False  # the tree was not verified: the draft says that it drew a token which it cannot have drawn
    logprobs: Logprobs | None = None
    num_cached_tokens: int = 0  # of an open: its tokens that were in the cache
    prompt_logprobs: Logprobs | None = None  # of an open, if requested: of the prompt's tokens but the first
    self_draft: TokenTree = EMPTY_TREE  # the tree that the target drafted itself; ``accepted`` are its nodes


@dataclass(frozen=True, slots=True)
class Budget:
    """How much may be drafted until the next advance: new nodes, depth below base, nodes below the tree in flight,
    and further candidates next to each new node."""

    max_nodes: int = 0
    max_depth: int = 0
    max_ahead: int = 0
    max_siblings: int = 0


@dataclass(frozen=True, slots=True)
class Advance:
    """News for the draft: ``token_ids`` are committed, the base is now ``base``, ``in_flight`` is being verified."""

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
    """New draft nodes: ``tree`` is below the end of ``path``, which starts at ``base``. ``end`` is None while more
    growths follow."""

    advance: int
    base: int
    path: tuple[int, ...]
    tree: TokenTree
    end: GrowthEnd | None


TRANSFORMS = "transforms"
"""The capability of a target that implements all of SamplingParams. A draft needs none: any proposal is valid."""

RESTRICTIONS = "restrictions"
"""The capability of a target that implements allowed_token_ids and bad_words."""

GRAMMAR = "grammar"
"""The capability of a target that can keep an output to a grammar. A draft needs none."""

LOGPROBS = "logprobs"
"""The capability of a target that returns logprobs."""

MAX_LOGPROBS = 20
"""Most likely tokens next to each token, at most."""

AUTONOMOUS = "autonomous"
"""The capability of a target that decodes autonomously and says how many autonomous verdicts follow."""

EARLY = "early"
"""The capability of a target that takes a round before the last one's verdict (pipelined verification)."""

SELF_DRAFT = "self_draft"
"""The capability of a target that drafts by itself."""

LOOKUP = "lookup"
"""What drafts in such a target (ModelInfo.self_draft) if it is prompt lookup in the sequence's own text."""

OVERRUN = 2
"""Tokens that an autonomously decoding target still returns after it is told to stop: one from the running pass, one
from the pass that handles the stop."""

AHEAD = "ahead"
"""The capability of a draft that grows below the tree in flight."""

SIBLINGS = "siblings"
"""The capability of a draft that proposes further candidates next to its chain."""

CACHE_SALT = "cache_salt"
"""The capability of a service that shares cached keys and values only between sequences with the same salt."""


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """Description of a replica's model."""

    name: str
    model_digest: str
    vocab_size: int
    tokenizer_fingerprint: str
    context_length: int
    dtype: str = "float32"
    capabilities: tuple[str, ...] = ()
    eos_token_ids: tuple[int, ...] = ()
    instance: str = ""  # id of the process that serves it
    backend: str = ""  # the backend that computes its passes; empty: unknown
    tokens: tuple[bytes, ...] = field(default=(), repr=False, compare=False)  # of each id; sent on request only
    max_chain: int = 0  # draft tokens of a round at most, of a target that verifies chains alone; 0: it takes trees
    self_draft: str = ""  # what a target drafts with by itself, such as eagle3; empty: nothing
    fixed_self_draft_nodes: int = 0  # nodes of each self-draft; 0: as many as asked for
    adapters: tuple[str, ...] = ()  # of a target: the names of those that a sequence may ask for


@dataclass(frozen=True, slots=True)
class Load:
    """Present load of a replica."""

    live_sequences: int = 0
    waiting_sequences: int = 0
    kv_slots_used: int = 0
    kv_slots_total: int = 0
    passes: int = 0
    open_streams: int = 0
    rows: int = 0  # rows of all passes so far; not sent to peers
