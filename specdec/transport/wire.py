"""Domain values <-> protobuf, and validation of what a peer sent: no malformed value passes.

Knows both forms; does not know streams, models or the history of a sequence. Every ``read_*`` raises InvalidArgument
with the name of the field.
"""

from __future__ import annotations

import math
import struct
from array import array
from collections.abc import Sequence
from dataclasses import fields, replace

from specdec.core.errors import InvalidArgument
from specdec.core.rounds import (
    MAX_LOGPROBS,
    Advance,
    Budget,
    Growth,
    GrowthEnd,
    Load,
    ModelInfo,
    Round,
    TargetOpen,
    Timings,
    Verdict,
)
from specdec.core.sequence import Method, Priority, SequenceSpec
from specdec.core.tree import EMPTY_TREE, MAX_CONFIDENCE, MAX_TREE_NODES, SparseDistribution, TokenTree
from specdec.transport.logprobs_wire import read_logprobs, write_logprobs
from specdec.transport.sampling_wire import (
    MAX_END_TOKENS,
    fields_of,
    read_sampling,
    sampling_problems,
    unknown_fields,
    write_sampling,
)
from specdec.v1 import common_pb2, draft_pb2, target_pb2

IDS_PER_OPEN = 8192
"""Token ids per open entry: about 24 KiB at three bytes each, so that a long open does not delay other sequences."""

MAX_SUPPORT = 1024
"""Most token ids in the distribution that a node was drawn from. Each id blocks the event loop for 0.65 us."""

MAX_SALT_BYTES = 256

_MAX_US = (1 << 32) - 1
"""The largest value of ``queue_us`` (uint32). A verdict may wait longer than that for a peer that does not read."""

_METHODS = {
    Method.COUPLED: common_pb2.VERIFICATION_METHOD_COUPLED,
    Method.TOKEN: common_pb2.VERIFICATION_METHOD_TOKEN,
    Method.BLOCK: common_pb2.VERIFICATION_METHOD_BLOCK,
}
_METHOD_OF: dict[int, Method] = {value: method for method, value in _METHODS.items()}
_ENDS = {
    GrowthEnd.BUDGET: draft_pb2.GROWTH_END_BUDGET,
    GrowthEnd.CONTEXT: draft_pb2.GROWTH_END_CONTEXT,
    GrowthEnd.UNLIKELY: draft_pb2.GROWTH_END_UNLIKELY,
    GrowthEnd.SUPERSEDED: draft_pb2.GROWTH_END_SUPERSEDED,
}
_END_OF: dict[int, GrowthEnd] = {value: end for end, value in _ENDS.items()}

# Fields that have one name and type on both sides.
_SPEC = ("num_prompt_tokens", "seed", "cache_salt")
_OPEN = ("num_preemptions", "max_self_draft_nodes", "adapter")
_LOGPROBS = ("num_logprobs", "num_prompt_logprobs")
_ROUND = ("number", "base", "num_autonomous", "max_nodes", "self_draft_nodes")
_VERDICT = ("round", "base", "next_token", "num_autonomous_left", "dropped_round", "refused", "num_cached_tokens")
_TIMINGS = tuple(field.name for field in fields(Timings))
_BUDGET = tuple(field.name for field in fields(Budget))
_LOAD = tuple(field.name for field in fields(Load) if field.name != "rows")
_INFO_LISTS = ("capabilities", "eos_token_ids", "tokens", "adapters")
_INFO = tuple(field.name for field in fields(ModelInfo) if field.name not in _INFO_LISTS)


# --- sequences ---------------------------------------------------------------------------------


def read_method(value: int) -> Method | None:
    return _METHOD_OF.get(value)


def write_method(method: Method) -> common_pb2.VerificationMethod:
    return _METHODS[method]


def read_priority(value: int) -> Priority | None:
    """0 is unspecified; None: unknown."""
    return Priority(value) if value in list(Priority) else None if value else Priority.STANDARD


def write_spec(spec: SequenceSpec, model_digest: str = "", traceparent: str = "") -> common_pb2.SequenceSpec:
    return common_pb2.SequenceSpec(
        token_ids=spec.token_ids,
        sampling=write_sampling(spec.sampling),
        method=_METHODS[spec.method],
        model_digest=model_digest,
        traceparent=traceparent,
        priority=int(spec.priority),  # type: ignore[arg-type]
        **fields_of(spec, _SPEC),
    )


def read_spec(message: common_pb2.SequenceSpec, vocab_size: int) -> SequenceSpec:
    """Read a whole spec, in which chunks are already joined."""
    sampling = read_sampling(message.sampling)
    problems = [
        (f"spec.sampling.{name}", what)
        for name, what in (*unknown_fields(message.sampling), *sampling_problems(sampling, vocab_size))
    ]
    method = read_method(message.method)
    if method is None:
        problems.append(("spec.method", f"unknown or unspecified method {message.method}"))
    if (priority := read_priority(message.priority)) is None:
        problems.append(("spec.priority", f"unknown priority {message.priority}"))
    ids = message.token_ids[:]  # a list: an iteration over the message takes twice as long
    if not ids:
        problems.append(("spec.token_ids", "must not be empty"))
    elif (largest := max(ids)) >= vocab_size:
        problems.append(("spec.token_ids", f"{largest} is outside the vocabulary of {vocab_size}"))
    if message.num_prompt_tokens > len(ids):
        problems.append(("spec.num_prompt_tokens", f"{message.num_prompt_tokens} of {len(ids)} token_ids"))
    if len(message.cache_salt) > MAX_SALT_BYTES:
        problems.append(("spec.cache_salt", f"at most {MAX_SALT_BYTES} bytes, not {len(message.cache_salt)}"))
    if problems or method is None or priority is None:
        raise InvalidArgument(problems)
    return SequenceSpec(
        array("I", ids), sampling=sampling, method=method, priority=priority, **fields_of(message, _SPEC)
    )


def write_target_open(
    sequence: int, open_: TargetOpen, *, part: common_pb2.SequenceSpec, more: bool
) -> target_pb2.TargetOpen:
    """``part``: of the open's spec; ``more`` follow."""
    return target_pb2.TargetOpen(
        sequence=sequence,
        spec=part,
        more=more,
        stop_token_ids=open_.stop_token_ids,
        request_age_ms=int(open_.age_s * 1e3),
        **fields_of(open_, (*_OPEN, *_LOGPROBS)),
    )


def read_target_open(message: target_pb2.TargetOpen, vocab_size: int) -> TargetOpen:
    """Read a whole open, in which chunks are already joined."""
    spec = read_spec(message.spec, vocab_size)
    wanted = {name: getattr(message, name) for name in _LOGPROBS if message.HasField(name)}
    for name, number in wanted.items():
        if number > MAX_LOGPROBS:
            raise InvalidArgument([(name, f"at most {MAX_LOGPROBS}, not {number}")])
    if (length := len(message.stop_token_ids)) > MAX_END_TOKENS:
        raise InvalidArgument([("stop_token_ids", f"at most {MAX_END_TOKENS}, not {length}")])
    _check_ids("stop_token_ids", message.stop_token_ids, vocab_size)
    if message.max_self_draft_nodes and not spec.keyed_by_token:
        raise InvalidArgument([("max_self_draft_nodes", f"must be 0 with {spec.method.value} verification")])
    stop_token_ids, age_s = frozenset(message.stop_token_ids), message.request_age_ms / 1e3
    return TargetOpen(spec, stop_token_ids, age_s=age_s, **wanted, **fields_of(message, _OPEN))


# --- trees --------------------------------------------------------------------------------------------------


def write_tree(tree: TokenTree) -> common_pb2.TokenTree:
    draft_probs = [fields_of(probs, ("token_ids", "weights")) if probs else {} for probs in tree.draft_probs]
    return common_pb2.TokenTree(
        token_ids=tree.token_ids,
        parents=() if tree.is_chain else tree.parents,
        draft_probs=[common_pb2.SparseDistribution(**fields) for fields in draft_probs],
        confidence=tree.confidence,
    )


def read_tree(message: common_pb2.TokenTree, vocab_size: int, field: str = "tree") -> TokenTree:
    token_ids = tuple(message.token_ids)
    if not token_ids:
        if message.parents or message.draft_probs or message.confidence:
            raise InvalidArgument([(field, "has parents, draft_probs or confidence but no token_ids")])
        return EMPTY_TREE
    if len(token_ids) > MAX_TREE_NODES:
        raise InvalidArgument([(field, f"at most {MAX_TREE_NODES} nodes, not {len(token_ids)}")])
    for node, probs in enumerate(message.draft_probs):  # sizes first, because the other checks take time per id
        if (size := max(len(probs.token_ids), len(probs.weights))) > MAX_SUPPORT:
            raise InvalidArgument([(f"{field}.draft_probs[{node}]", f"at most {MAX_SUPPORT} tokens, not {size}")])
    parents = tuple(message.parents) or tuple(range(-1, len(token_ids) - 1))
    draft_probs = tuple(
        SparseDistribution(tuple(probs.token_ids), tuple(probs.weights)) if probs.token_ids or probs.weights else None
        for probs in message.draft_probs
    )
    confidence = tuple(min(bucket, MAX_CONFIDENCE) for bucket in message.confidence)
    tree = TokenTree(token_ids, parents, draft_probs, confidence=confidence)
    if problem := tree.problem(vocab_size):
        raise InvalidArgument([(field, problem)])
    if draft_probs and not tree.is_chain:
        raise InvalidArgument([(f"{field}.draft_probs", "only a chain can carry distributions")])
    for node, (token, distribution) in enumerate(zip(token_ids, draft_probs, strict=False)):
        if distribution and (problem := _distribution_problem(distribution, token, vocab_size)):
            raise InvalidArgument([(f"{field}.draft_probs[{node}]", problem)])
    return tree


def _distribution_problem(distribution: SparseDistribution, token: int, vocab_size: int) -> str | None:
    ids, weights = distribution.token_ids, distribution.weights
    if len(ids) != len(weights):
        return f"{len(ids)} token_ids but {len(weights)} weights"
    if len(set(ids)) != len(ids):
        return "token_ids repeat"
    if max(ids) >= vocab_size:
        return f"token {max(ids)} is outside the vocabulary of {vocab_size}"
    if not all(math.isfinite(w) and w > 0 for w in weights):
        return "weights must be finite and positive"
    if max(weights) != 1:
        return f"the largest weight must be 1, not {max(weights)}"
    if any(struct.unpack("e", struct.pack("e", w))[0] != w for w in weights):
        return "weights must be representable in fp16"
    if token not in ids:
        return f"the drafted token {token} has no weight"
    return None


# --- rounds and verdicts ------------------------------------------------------------------------------------


def write_round(sequence: int, round_: Round) -> target_pb2.Round:
    return target_pb2.Round(sequence=sequence, tree=write_tree(round_.tree), **fields_of(round_, _ROUND))


def read_round(message: target_pb2.Round, vocab_size: int) -> Round:
    return Round(tree=read_tree(message.tree, vocab_size), **fields_of(message, _ROUND))


def write_verdict(sequence: int, verdict: Verdict) -> target_pb2.Verdict:
    timings = replace(verdict.timings, queue_us=min(verdict.timings.queue_us, _MAX_US))
    return target_pb2.Verdict(
        sequence=sequence,
        accepted=verdict.accepted,
        timings=target_pb2.Timings(**fields_of(timings, _TIMINGS)),
        logprobs=write_logprobs(verdict.logprobs) if verdict.logprobs else None,
        self_draft=write_tree(verdict.self_draft) if verdict.self_draft else None,
        **fields_of(verdict, _VERDICT),
    )


def read_verdict(message: target_pb2.Verdict, vocab_size: int) -> Verdict:
    _check_ids("next_token", [message.next_token], vocab_size)
    return Verdict(
        accepted=tuple(message.accepted),
        timings=Timings(**fields_of(message.timings, _TIMINGS)),
        logprobs=read_logprobs(message.logprobs, vocab_size) if message.HasField("logprobs") else None,
        self_draft=read_tree(message.self_draft, vocab_size, "self_draft"),
        **fields_of(message, _VERDICT),
    )


# --- advances and growths -----------------------------------------------------------------------------------


def write_budget(budget: Budget) -> draft_pb2.DraftBudget:
    return draft_pb2.DraftBudget(**fields_of(budget, _BUDGET))


def read_budget(message: draft_pb2.DraftBudget) -> Budget:
    return Budget(**fields_of(message, _BUDGET))


def write_advance(sequence: int, advance: Advance) -> draft_pb2.Advance:
    return draft_pb2.Advance(
        sequence=sequence,
        in_flight=write_tree(advance.in_flight),
        budget=write_budget(advance.budget),
        **fields_of(advance, ("number", "base", "token_ids")),
    )


def read_advance(message: draft_pb2.Advance, vocab_size: int) -> Advance:
    _check_ids("token_ids", message.token_ids, vocab_size)
    return Advance(
        token_ids=tuple(message.token_ids),
        in_flight=read_tree(message.in_flight, vocab_size, "in_flight"),
        budget=read_budget(message.budget),
        **fields_of(message, ("number", "base")),
    )


def write_growth(sequence: int, growth: Growth) -> draft_pb2.Growth:
    return draft_pb2.Growth(
        sequence=sequence,
        tree=write_tree(growth.tree),
        end=_ENDS[growth.end] if growth.end else draft_pb2.GROWTH_END_UNSPECIFIED,
        **fields_of(growth, ("advance", "base", "path")),
    )


def read_growth(message: draft_pb2.Growth, vocab_size: int) -> Growth:
    _check_ids("path", message.path, vocab_size)
    return Growth(
        path=tuple(message.path),
        tree=read_tree(message.tree, vocab_size),
        end=_END_OF.get(message.end),
        **fields_of(message, ("advance", "base")),
    )


def _check_ids(field: str, ids: Sequence[int], vocab_size: int) -> None:
    if ids and (largest := max(ids)) >= vocab_size:
        raise InvalidArgument([(field, f"{largest} is outside the vocabulary of {vocab_size}")])


# --- models and load ----------------------------------------------------------------------------------------


def write_info(info: ModelInfo) -> common_pb2.ModelInfo:
    return common_pb2.ModelInfo(**fields_of(info, (*_INFO, *_INFO_LISTS)))


def read_info(message: common_pb2.ModelInfo) -> ModelInfo:
    values = fields_of(message, _INFO) | {name: tuple(getattr(message, name)) for name in _INFO_LISTS}
    return ModelInfo(**values)


def write_load(load: Load) -> common_pb2.Load:
    return common_pb2.Load(**fields_of(load, _LOAD))


def read_load(message: common_pb2.Load) -> Load:
    return Load(**fields_of(message, _LOAD))
