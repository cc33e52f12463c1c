"""A pass as a function of memory that never moves: the model's modules, the draw, and one copy of results to the host.

Passes are padded to size classes (specdec.backends.cuda.plan.Shape). Within a class every product has the same sizes,
so a row's bits do not depend on the other rows. Further rows are passes of one row for each chain. Each prepares the
next on the device, and the host reads nothing between them.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from specdec.backends.cuda.attention import PlannedAttention
from specdec.backends.cuda.graphs import Captured
from specdec.backends.cuda.memory import PassMemory
from specdec.backends.cuda.plan import KEYS, PADDING, TABLE, Inputs, Shape, kernel_draws
from specdec.backends.packed_pass import PackedPass
from specdec.backends.taps import Taps, tapped_layers
from specdec.core.device import indices
from specdec.kvcache.store import KvStore
from specdec.passes.outputs import NOT_DRAWN, PassOutputs
from specdec.passes.rows import PassRows

_MAX_GRAPH_ROWS = 128
"""A pass with more rows takes longer than its launches."""

Drawing = Callable[[Tensor, PassMemory], Tensor]
"""From logits [rows, vocab] and the draws in memory to tokens [rows] int32."""


class _Computed(NamedTuple):
    """The results of a pass, padding included. ``states``: of open taps, by boundary."""

    logits: Tensor  # [logit rows, vocab]
    features: Tensor  # [logit rows, hidden_size]
    tokens: Tensor  # [logit rows] int32: drawn
    sound: Tensor  # [rows] bool: whether the values are finite
    finite: Tensor  # [logit rows] bool: whether the logits are
    states: dict[int, Tensor]  # [rows, hidden_size] each

    def kept(self, num_rows: int, num_logits: int) -> _Kept:
        tokens, finite = self.tokens[:num_logits], self.finite[:num_logits]
        numbers = torch.cat([tokens, self.sound[:num_rows].int(), finite.int()])
        return _Kept(self.logits[:num_logits].clone(), self.features[:num_logits].clone(), numbers, num_logits)


class _Kept(NamedTuple):
    """Results without padding, in memory of their own, because the next pass overwrites the others."""

    logits: Tensor
    features: Tensor
    numbers: Tensor  # [logit rows + rows + logit rows] int32
    num_logits: int


class _Static(NamedTuple):
    memory: PassMemory
    computed: Callable[[KvStore], _Computed]


class StaticPass:
    """See specdec.backends.base.ModelCall. One pass at a time."""

    decodes_further = True

    def __init__(self, model: PreTrainedModel, vocab_size: int, draw: Drawing) -> None:
        self._model, self._device, self._vocab_size, self._draw = model, model.device, vocab_size, draw
        self._features: Tensor | None = None
        self._taps: Taps | None = None
        self._yield_requested = False
        self._pool: Any = torch.cuda.graph_pool_handle() if self._device.type == "cuda" else None
        head: torch.nn.Module = model.get_output_embeddings()  # type: ignore[no-untyped-call]
        head.register_forward_pre_hook(self._remember_features)

    def request_yield(self, requested: bool) -> None:
        self._yield_requested = requested

    def tap(self, boundaries: Sequence[int]) -> Taps:
        self._taps = tapped_layers(self._model, boundaries)
        return self._taps

    def __call__(
        self, token_ids: Sequence[int], positions: Sequence[int], logit_rows: Sequence[int], packed_pass: PackedPass
    ) -> PassOutputs:
        rows, store, attention = packed_pass.rows, packed_pass.store, packed_pass.attention
        assert isinstance(attention, PlannedAttention), "of the same backend"
        if not token_ids:
            empty = torch.empty(0, self._vocab_size, dtype=self._model.dtype, device=self._device)
            return PassOutputs(empty, empty, np.zeros(0, np.bool_))
        draws = rows.draws_after(logit_rows)
        static = self._static(self._compute, store, attention.plan.shape(len(logit_rows)))
        static.memory.load(attention.plan, Inputs(token_ids, positions, logit_rows, draws))
        computed = static.computed(store)
        for boundary, states in computed.states.items():
            assert self._taps is not None
            self._taps.put(boundary, states[: len(token_ids)].clone())
        kept = [computed.kept(len(token_ids), len(logit_rows))]
        last: list[int] = []  # logit rows of the last rows, if further ones follow
        if rows.num_further and all(map(kernel_draws, rows.draws)):
            last = [logit_rows.index(row) for row in rows.last_rows]
            kept += self._further(packed_pass, attention, positions, computed.tokens[indices(last, self._device)])
        is_drawn = [draw is not None and kernel_draws(draw) for draw in draws]
        return _outputs(kept, logit_rows, is_drawn, last)

    def _further(
        self, packed_pass: PackedPass, attention: PlannedAttention, positions: Sequence[int], tokens: Tensor
    ) -> list[_Kept]:
        """Passes of one row of each chain, first of ``tokens`` [chains], until a yield is requested."""
        rows, num = packed_pass.rows, len(tokens)
        plan = attention.plan.next(rows.last_rows, rows.num_further)
        draws = [draw._replace(position=draw.position + 1) for draw in rows.draws]
        static = self._static(self._step, packed_pass.store, plan.shape(num))
        next_positions = [positions[row] + 1 for row in rows.last_rows]
        static.memory.load(plan, Inputs([0] * num, next_positions, range(num), draws))
        static.memory["token_ids"][:num].copy_(tokens)
        kept: list[_Kept] = []
        while len(kept) < rows.num_further and not self._yield_requested:
            kept.append(static.computed(packed_pass.store).kept(num, num))
        return kept

    def _static(self, compute: Callable[[PassMemory, KvStore], _Computed], store: KvStore, shape: Shape) -> _Static:
        """The function ``compute`` for the size class of ``shape``, which lives as long as the store."""
        shape = shape.class_of()

        def make(store: KvStore) -> _Static:
            memory = PassMemory(shape, self._device, store.block_size)
            of_memory = functools.partial(compute, memory)
            is_small = shape.rows <= _MAX_GRAPH_ROWS
            return _Static(memory, Captured(of_memory, memory.there, self._pool) if is_small else of_memory)

        return store.described((compute.__name__, shape, self._open_taps), make)

    @property
    def _open_taps(self) -> tuple[int, ...]:
        return self._taps.boundaries if self._taps is not None and self._taps.is_open else ()

    def _compute(self, memory: PassMemory, store: KvStore) -> _Computed:
        """The pass in ``memory``."""
        attention = PlannedAttention(self._device, memory.block_size, memory=memory)
        packed_pass = PackedPass(store, PassRows((), memory.block_size), attention, num_rows=memory.shape.rows)
        output = self._model(
            input_ids=memory["token_ids"][None],
            position_ids=memory["positions"][None],
            use_cache=False,
            logits_to_keep=memory["logit_rows"],
            packed_pass=packed_pass,
        )
        features, self._features = self._features, None
        assert features is not None, "the output embedding is part of the pass"
        logits = output.logits[0, :, : self._vocab_size]
        tokens = self._draw(logits, memory)
        states = self._taps.taken() if self._taps is not None and self._taps.is_open else {}
        finite = logits.amax(-1).isfinite()
        return _Computed(logits, features[0], tokens, sound=packed_pass.sound(), finite=finite, states=states)

    def _step(self, memory: PassMemory, store: KvStore) -> _Computed:
        """The pass in ``memory``, of one row for each chain, which becomes that of the rows after them."""
        computed, size = self._compute(memory, store), memory.block_size
        positions, chains, slots = memory["positions"], memory["chains"], memory["slots"]
        goes_on = slots != PADDING
        memory["token_ids"].copy_(computed.tokens)
        for numbers in (positions, memory["draw_positions"], chains[:, KEYS]):
            numbers.add_(goes_on)
        # Past the last row there may be no block, and nothing reads that slot.
        at = (chains[:, TABLE] + positions // size).clamp_max(memory.shape.blocks - 1)
        slots.copy_(torch.where(goes_on, memory["blocks"][at] * size + positions % size, PADDING))
        return computed

    def _remember_features(self, _: Any, inputs: tuple[Tensor]) -> None:
        self._features = inputs[0]


def _outputs(
    kept: Sequence[_Kept], logit_rows: Sequence[int], is_drawn: Sequence[bool], last: Sequence[int]
) -> PassOutputs:
    """The results of a pass and of those of its further rows. The host waits for the device here, once."""
    numbers = torch.cat([read.numbers for read in kept]).cpu().numpy()
    parts = np.split(numbers, np.cumsum([len(read.numbers) for read in kept])[:-1])
    tokens = [part[: read.num_logits].tolist() for read, part in zip(kept, parts, strict=True)]
    sound = [part[read.num_logits : len(part) - read.num_logits] for read, part in zip(kept, parts, strict=True)]
    finite = [part[len(part) - read.num_logits :] for read, part in zip(kept, parts, strict=True)]
    num_rows, rows = len(sound[0]), np.concatenate(sound) != 0
    rows[[*logit_rows, *range(num_rows, len(rows))]] &= np.concatenate(finite) != 0
    fed = [[tokens[0][row] for row in last], *tokens[1:]][: len(kept) - 1]  # by each pass of further rows
    drawn = [token if known else NOT_DRAWN for token, known in zip(tokens[0], is_drawn, strict=True)]
    return PassOutputs(
        torch.cat([read.logits for read in kept]),
        torch.cat([read.features for read in kept]),
        rows,
        further=[[step[chain] for step in fed] for chain in range(len(last))],
        drawn=[*drawn, *itertools.chain(*tokens[1:])],
    )
