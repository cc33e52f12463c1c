"""The probe at load: a model can be served if its packed passes give the logits of its plain forward pass.

Knows a model as a function that gives logits; does not know architectures, so it also covers untested ones. It feeds
three short texts, two with a common prefix, in packed chunks and trees. This detects custom attention, state outside
keys and values, and masks or positions that depend on more than a row's ancestors. Sliding windows and attention
chunks are shortened meanwhile, to detect errors there too.
"""

from __future__ import annotations

import inspect
import logging
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specdec.backends.base import Backend
from specdec.core.rounds import ModelInfo
from specdec.kvcache.block_pool import SequenceCache
from specdec.passes.rows import Segment
from specdec.runner.model_runner import ModelRunner

log = logging.getLogger(__name__)

NUM_SLOTS = 64
"""Slots that the probe needs in the runner's pool."""

_LENGTH, _COMMON, _FIRST = 8, 6, (5, 3)  # tokens of a text, of the common prefix, of the first pass
_WINDOW = 3
_TOLERANCE = {torch.float32: 1e-3}
_TOLERANCE_OTHERWISE = 0.1
_PACKED_LAYERS = ("full_attention", "sliding_attention")
_NOT_CAUSAL = "it is no decoder: a token changes the logits before it"
_MOVED = (
    "a text near the end of its context ({}) changes how all positions of a pass are encoded, so a text would depend"
    " on others"
)


class UnsupportedModelError(ValueError):
    """The model cannot be served; the message has the reason."""


def make_texts(vocab_size: int) -> list[list[int]]:
    """Three texts of equal length; the first two have a common prefix."""
    rng = random.Random(0)
    texts = [[rng.randrange(vocab_size) for _ in range(_LENGTH)] for _ in range(3)]
    texts[1][:_COMMON] = texts[0][:_COMMON]
    texts[1][_COMMON] = (texts[0][_COMMON] + 1) % vocab_size
    return texts


@torch.inference_mode()
def plain_logits(model: PreTrainedModel, info: ModelInfo) -> Tensor:  # [texts, length, vocab_size]
    """The logits by transformers, to be computed before a runner takes over the model. Raises UnsupportedModelError."""
    ids = torch.tensor(make_texts(info.vocab_size), device=model.device)
    name = type(model).__name__
    try:
        model.train(False)
        model.set_attn_implementation("eager")
        with _short_windows(model):
            logits: Tensor = model(input_ids=ids, use_cache=False).logits
            others = _logits_before_other_ends(model, ids, info)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        raise UnsupportedModelError(f"a plain forward pass of {name} fails ({_words(error)})") from error
    if not bool(logits.isfinite().all()):
        raise UnsupportedModelError(f"a plain forward pass of {name} gives NaN or infinity")
    for before, why in zip(others, (_NOT_CAUSAL, _MOVED.format(info.context_length)), strict=False):
        # A fraction, since both are computed alike; experts round differently with the rows that they get.
        if relative_error(before, logits[:, :-1]) > _tolerance(model) / 5:
            raise UnsupportedModelError(f"{name} cannot be served: {why}")
    return logits[..., : info.vocab_size]


def _logits_before_other_ends(model: PreTrainedModel, ids: Tensor, info: ModelInfo) -> list[Tensor]:
    """The logits [texts, length - 1, vocab] before another last token, and before one at the end of the context.

    Without the second if the model gets no positions, which a packed pass finds.
    """
    others = ids.clone()
    others[:, -1] = (ids[:, -1] + 1) % info.vocab_size
    before = [model(input_ids=others, use_cache=False).logits[:, :-1]]
    if "position_ids" in inspect.signature(model.forward).parameters:
        positions = torch.arange(_LENGTH, device=ids.device)
        positions[-1] = info.context_length - 1
        far = model(input_ids=ids, position_ids=positions.expand_as(ids), use_cache=False)
        before.append(far.logits[:, :-1])
    return before


def prove(model: PreTrainedModel, info: ModelInfo, backend: Backend, expected: Tensor) -> ModelRunner:
    """A runner of ``model``, with an empty pool, if its packed passes give ``expected``, from ``plain_logits``.

    Raises UnsupportedModelError. Logs a warning if a row's logits depend on the other rows of its pass, which can then
    change a text at a near tie.
    """
    try:
        runner = ModelRunner(model, info, NUM_SLOTS, backend=backend)
        with _short_windows(model):
            logits, depends = _packed_logits(runner)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        raise UnsupportedModelError(
            f"{type(model).__name__} cannot be served: {_reason(model)} (a packed pass fails, {_words(error)})"
        ) from error
    off = relative_error(logits, expected)
    tolerance = _tolerance(model)
    if not off <= tolerance:
        raise UnsupportedModelError(
            f"{type(model).__name__} cannot be served: {_reason(model)} (logits of packed passes are off by {off:.1%}"
            f" of their spread; rounding explains {tolerance:.1%})"
        )
    log.info("packed passes agree with the plain model", extra={"relative_error": f"{off:.1e}"})
    if depends:
        log.warning("a row's logits depend on the other rows of its pass: at a near tie a text may depend on the load")
    runner.pool.forget()
    return runner


def _tolerance(model: PreTrainedModel) -> float:
    return _TOLERANCE.get(model.dtype, _TOLERANCE_OTHERWISE)


def relative_error(logits: Tensor, expected: Tensor) -> float:
    """The root mean square error of all logits, divided by the standard deviation of ``expected``."""
    off = (logits.float() - expected.float()).square().mean().sqrt()
    return float(off / (expected.float().std() + 1e-30))


def _reason(model: PreTrainedModel) -> str:
    """Why packed passes of this model are wrong, if its configuration shows it."""
    kinds = {*(getattr(model.config.get_text_config(), "layer_types", None) or ())} - {*_PACKED_LAYERS}
    if kinds:
        return f"it has layers of {' and '.join(sorted(kinds))}; only {' and '.join(_PACKED_LAYERS)} can be packed"
    if not getattr(model, "_supports_attention_backend", True):
        return "it does not compute its attention through transformers' attention interface"
    return "something other than its keys and values, their positions and ancestors decides its logits"


def _packed_logits(runner: ModelRunner) -> tuple[Tensor, bool]:
    """The logits of ``plain_logits`` by packed passes, and whether a row's bits depend on the other rows."""
    one, other, third = make_texts(runner.info.vocab_size)
    first_length, third_length = _FIRST
    trunk, lone = runner.new_cache(), runner.new_cache()
    chunks = [_chain(trunk, one[:first_length]), _chain(lone, third[:third_length])]
    first, third_first = (outputs.logits for outputs in runner.forward(chunks))
    trunk.keep(range(first_length))
    lone.keep(range(third_length))
    # The rest of the common prefix, then both ends as a tree below it, level by level.
    rest = one[first_length:_COMMON]
    last = len(rest) - 1
    ends = [token for pair in zip(one[_COMMON:], other[_COMMON:], strict=True) for token in pair]
    parents = [*range(-1, last), last, last, *range(len(rest), len(rest) + len(ends) - 2)]
    trunk.take(len(rest) + len(ends))
    blocks = list(trunk.block_table)
    tree = Segment([*rest, *ends], parents, first_length, block_table=blocks, logit_rows=range(len(parents)))
    second, third_second = (outputs.logits for outputs in runner.forward([tree, _chain(lone, third[third_length:])]))
    common, branches = second[: len(rest)], second[len(rest) :]
    trunk.release()
    lone.release()
    again = runner.new_cache()
    alone = []  # row by row: passes of a single row
    for token in one[:first_length]:
        alone += [outputs.logits for outputs in runner.forward([_chain(again, [token])])]
        again.keep(range(1))
    again.release()
    logits = torch.stack(
        [
            torch.cat([first, common, branches[0::2]]),
            torch.cat([first, common, branches[1::2]]),
            torch.cat([third_first, third_second]),
        ]
    )
    return logits, not torch.equal(torch.cat(alone), first)


def _chain(cache: SequenceCache, ids: list[int]) -> Segment:
    num_context = len(cache)
    cache.take(len(ids))
    return Segment.chain(ids, num_context, list(cache.block_table), logit_rows=range(len(ids)))


@contextmanager
def _short_windows(model: PreTrainedModel) -> Iterator[None]:
    """A context in which attention with a window or chunks is limited to ``_WINDOW`` tokens."""
    owners: list[Any] = [*model.modules(), model.config, model.config.get_text_config()]
    changed = [
        (owner, name, value)
        for owner in owners
        for name in ("sliding_window", "attention_chunk_size")
        if isinstance(value := getattr(owner, name, None), int) and not isinstance(value, bool)
    ]
    try:
        for owner, name, _ in changed:
            setattr(owner, name, _WINDOW)
        yield
    finally:
        for owner, name, value in changed:
            setattr(owner, name, value)


def _words(error: Exception) -> str:
    text = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
