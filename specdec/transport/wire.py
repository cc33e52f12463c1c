"""Domain values <-> protobuf, and validation of what a peer sent: no malformed value passes.

Knows both forms; does not know streams, models or the history of a sequence. Every ``read_*`` raises InvalidArgument
with the name of the field.
"""

from __future__ import annotations

import math
import struct
from array import array
from dataclasses import asdict, fields, replace

from specdec.core.errors import InvalidArgument
from specdec.core.rounds import Advance, Budget, Growth, GrowthEnd, Load, ModelInfo, Round, Timings, Verdict
from specdec.core.sequence import Method, SequenceSpec
from specdec.core.tree import EMPTY_TREE, MAX_CONFIDENCE, MAX_TREE_NODES, SparseDistribution, TokenTree
from specdec.transport.logprobs_wire import read_logprobs, write_logprobs
from specdec.transport.sampling_wire import read_sampling, sampling_problems, unknown_fields, write_sampling
from specdec.v1 import common_pb2, draft_pb2, target_pb2

IDS_PER_OPEN = 8192
"""Token ids per open entry: about 24 KiB at three bytes each, so that a long open does not delay other sequences."""

MAX_SUPPORT = 1024
"""Most token ids in the distribution that a node was drawn from. Each id blocks the event loop for 0.65 us."""

MAX_SALT_BYTES = 256

_MOST_US = (1 << 32) - 1
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


# --- sampling and sequences ---------------------------------------------------------------------------------


def read_method(value: int) -> Method | None:
    return _METHOD_OF.get(value)


def write_method(method: Method) -> common_pb2.VerificationMethod:
    return _METHODS[method]


def write_spec(spec: SequenceSpec, model_digest: str = "", traceparent: str = "") -> common_pb2.SequenceSpec:
    return common_pb2.SequenceSpec(
        token_ids=spec.token_ids,
        num_prompt_tokens=spec.num_prompt_tokens,
        sampling=write_sampling(spec.sampling),
        seed=spec.seed,
        method=_METHODS[spec.method],
        model_digest=model_digest,
        traceparent=traceparent,
        cache_salt=spec.cache_salt,
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
    ids = message.token_ids[:]  # a list: an iteration over the message takes twice as long
    if not ids:
        problems.append(("spec.token_ids", "must not be empty"))
    elif (largest := max(ids)) >= vocab_size:
        problems.append(("spec.token_ids", f"{largest} is outside the vocabulary of {vocab_size}"))
    if message.num_prompt_tokens > len(ids):
        problems.append(("spec.num_prompt_tokens", f"{message.num_prompt_tokens} of {len(ids)} token_ids"))
    if len(message.cache_salt) > MAX_SALT_BYTES:
        problems.append(("spec.cache_salt", f"at most {MAX_SALT_BYTES} bytes, not {len(message.cache_salt)}"))
    if problems or method is None:
        raise InvalidArgument(problems)
    return SequenceSpec(array("I", ids), message.num_prompt_tokens, sampling, message.seed, method, message.cache_salt)


# --- trees --------------------------------------------------------------------------------------------------


def write_tree(tree: TokenTree) -> common_pb2.TokenTree:
    return common_pb2.TokenTree(
        token_ids=tree.token_ids,
        parents=() if tree.is_chain else tree.parents,
        draft_probs=[
            common_pb2.SparseDistribution(token_ids=d.token_ids, weights=d.weights)
            if d
            else common_pb2.SparseDistribution()
            for d in tree.draft_probs
        ],
        sure=tree.confidence,
    )


def read_tree(message: common_pb2.TokenTree, vocab_size: int, field: str = "tree") -> TokenTree:
    token_ids = tuple(message.token_ids)
    if not token_ids:
        if message.parents or message.draft_probs or message.sure:
            raise InvalidArgument([(field, "has parents, draft_probs or sure but no token_ids")])
        return EMPTY_TREE
    if len(token_ids) > MAX_TREE_NODES:
        raise InvalidArgument([(field, f"at most {MAX_TREE_NODES} nodes, not {len(token_ids)}")])
    for node, each in enumerate(message.draft_probs):  # sizes first, because the other checks take time per id
        if (size := max(len(each.token_ids), len(each.weights))) > MAX_SUPPORT:
            raise InvalidArgument([(f"{field}.draft_probs[{node}]", f"at most {MAX_SUPPORT} tokens, not {size}")])
    parents = tuple(message.parents) or tuple(range(-1, len(token_ids) - 1))
    draft_probs = tuple(
        SparseDistribution(tuple(d.token_ids), tuple(d.weights)) if d.token_ids or d.weights else None
        for d in message.draft_probs
    )
    tree = TokenTree(
        token_ids, parents, draft_probs, tuple(min(confidence, MAX_CONFIDENCE) for confidence in message.sure)
    )
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
    return target_pb2.Round(
        sequence=sequence,
        round=round_.number,
        base=round_.base,
        tree=write_tree(round_.tree),
        run_on=round_.run_on,
        max_nodes=round_.max_nodes,
        own=round_.own,
    )


def read_round(message: target_pb2.Round, vocab_size: int) -> Round:
    tree = read_tree(message.tree, vocab_size)
    return Round(message.round, message.base, tree, message.run_on, message.max_nodes, message.own)


def write_verdict(sequence: int, verdict: Verdict) -> target_pb2.Verdict:
    timings = verdict.timings
    return target_pb2.Verdict(
        sequence=sequence,
        round=verdict.round,
        base=verdict.base,
        accepted=verdict.accepted,
        next_token=verdict.next_token,
        timings=target_pb2.Timings(**asdict(replace(timings, queue_us=min(timings.queue_us, _MOST_US)))),
        run_on=verdict.run_on,
        dropped_round=verdict.dropped,
        refused=verdict.refused,
        logprobs=write_logprobs(verdict.logprobs) if verdict.logprobs else None,
        num_cached_tokens=verdict.num_cached,
        own=write_tree(verdict.own) if verdict.own else None,
    )


def read_verdict(message: target_pb2.Verdict, vocab_size: int) -> Verdict:
    if message.next_token >= vocab_size:
        raise InvalidArgument([("next_token", f"{message.next_token} is outside the vocabulary of {vocab_size}")])
    timings = message.timings
    return Verdict(
        message.round,
        message.base,
        tuple(message.accepted),
        message.next_token,
        Timings(**{field.name: getattr(timings, field.name) for field in fields(Timings)}),
        run_on=message.run_on,
        dropped=message.dropped_round,
        refused=message.refused,
        logprobs=read_logprobs(message.logprobs, vocab_size) if message.HasField("logprobs") else None,
        num_cached=message.num_cached_tokens,
        own=read_tree(message.own, vocab_size, "own") if message.HasField("own") else EMPTY_TREE,
    )


# --- advances and growths -----------------------------------------------------------------------------------


def write_budget(budget: Budget) -> draft_pb2.DraftBudget:
    return draft_pb2.DraftBudget(
        max_nodes=budget.max_nodes,
        max_depth=budget.max_depth,
        max_ahead=budget.max_ahead,
        max_siblings=budget.max_siblings,
    )


def read_budget(message: draft_pb2.DraftBudget) -> Budget:
    return Budget(message.max_nodes, message.max_depth, message.max_ahead, message.max_siblings)


def write_advance(sequence: int, advance: Advance) -> draft_pb2.Advance:
    return draft_pb2.Advance(
        sequence=sequence,
        advance=advance.number,
        token_ids=advance.token_ids,
        base=advance.base,
        in_flight=write_tree(advance.in_flight),
        budget=write_budget(advance.budget),
    )


def read_advance(message: draft_pb2.Advance, vocab_size: int) -> Advance:
    if message.token_ids and (largest := max(message.token_ids)) >= vocab_size:
        raise InvalidArgument([("token_ids", f"{largest} is outside the vocabulary of {vocab_size}")])
    return Advance(
        message.advance,
        message.base,
        tuple(message.token_ids),
        read_tree(message.in_flight, vocab_size, "in_flight"),
        read_budget(message.budget),
    )


def write_growth(sequence: int, growth: Growth) -> draft_pb2.Growth:
    return draft_pb2.Growth(
        sequence=sequence,
        advance=growth.advance,
        base=growth.base,
        path=growth.path,
        tree=write_tree(growth.tree),
        end=_ENDS[growth.end] if growth.end else draft_pb2.GROWTH_END_UNSPECIFIED,
    )


def read_growth(message: draft_pb2.Growth, vocab_size: int) -> Growth:
    if message.path and (largest := max(message.path)) >= vocab_size:
        raise InvalidArgument([("path", f"{largest} is outside the vocabulary of {vocab_size}")])
    return Growth(
        message.advance,
        message.base,
        tuple(message.path),
        read_tree(message.tree, vocab_size),
        _END_OF.get(message.end),
    )


# --- models and load ----------------------------------------------------------------------------------------


def write_info(info: ModelInfo) -> common_pb2.ModelInfo:
    return common_pb2.ModelInfo(**{field.name: getattr(info, field.name) for field in fields(info)})


def read_info(message: common_pb2.ModelInfo) -> ModelInfo:
    return ModelInfo(
        message.name,
        message.model_digest,
        message.vocab_size,
        message.tokenizer_fingerprint,
        message.context_length,
        message.dtype,
        tuple(message.capabilities),
        tuple(message.eos_token_ids),
        message.instance,
        message.backend,
        tuple(message.tokens),
        message.max_chain,
        message.head,
        message.own_nodes,
    )


def write_load(load: Load) -> common_pb2.Load:
    return common_pb2.Load(
        live_sequences=load.live_sequences,
        waiting_sequences=load.waiting_sequences,
        kv_slots_used=load.kv_slots_used,
        kv_slots_total=load.kv_slots_total,
        passes=load.passes,
        open_streams=load.open_streams,
    )


def read_load(message: common_pb2.Load) -> Load:
    return Load(
        message.live_sequences,
        message.waiting_sequences,
        message.kv_slots_used,
        message.kv_slots_total,
        message.passes,
        message.open_streams,
    )
