"""A Hugging Face causal LM over packed rows: rows of many sequences in one pass, without padding.

Knows the model, its KV pool and what a row may attend to; refuses to know sampling and sequences' lives. The
attention function is registered with transformers under a name of ours and receives the pass as an extra
keyword argument, so that the model classes stay as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AutoModelForCausalLM, PreTrainedModel

from specdec.checkpoint import Checkpoint
from specdec.kv_cache import KvPool, SequenceCache
from specdec.rounds import ModelInfo
from specdec.settings import ModelServiceSettings

ATTENTION = "specdec_packed"

ROW_MULTIPLE = {torch.float32: 4, torch.bfloat16: 1}
"""Passes are padded to a multiple of this: a row's logits must not depend on its company. Fewer than four float32
rows take another kernel, whose last bits differ, and so does what is left over when threads divide the rows."""


@dataclass(frozen=True, slots=True)
class Segment:
    """One sequence's rows in a pass: plain data.

    ``parents[i]`` is the row before row i in the text, or -1 if that is the last cached position: a row sees
    the cached context, its ancestors and itself. ``logit_rows`` are the rows whose logits are wanted.
    """

    token_ids: Sequence[int]
    parents: Sequence[int]
    context_slots: Sequence[int]
    row_slots: Sequence[int]
    logit_rows: Sequence[int]


@dataclass(frozen=True, slots=True)
class _PackedSegment:
    rows: slice
    slots: Tensor  # [context + rows]: the keys this segment attends to
    visible: Tensor | None  # [rows, context + rows] bool; None: everything
    distance: Tensor  # [rows, context + rows] int: query position - key position


@dataclass(frozen=True, slots=True)
class _Pass:
    pool: KvPool
    row_slots: Tensor  # [rows without padding]
    segments: Sequence[_PackedSegment]


class ModelRunner:
    """A loaded model and its KV pool."""

    def __init__(self, model: PreTrainedModel, info: ModelInfo, num_slots: int, device: str = "cpu") -> None:
        model.train(False)
        self.model: PreTrainedModel = torch.nn.Module.to(model, device)  # transformers hides the signature
        self.model.set_attn_implementation(ATTENTION)
        self.info = info
        self.device = torch.device(device)
        self.pool = KvPool(num_slots, self.device)
        self._row_multiple = ROW_MULTIPLE.get(model.dtype, 1)

    def new_cache(self) -> SequenceCache:
        return SequenceCache(self.pool)

    @torch.inference_mode()
    def forward(self, segments: Sequence[Segment]) -> list[Tensor]:
        """One pass. Per segment the logits [len(logit_rows), vocab_size] in the model's dtype."""
        token_ids: list[int] = []
        positions: list[int] = []
        row_slots: list[int] = []
        wanted: list[int] = []
        packed = []
        for segment in segments:
            start = len(token_ids)
            segment_positions, packed_segment = self._pack(segment, start)
            positions.extend(segment_positions)
            packed.append(packed_segment)
            token_ids.extend(segment.token_ids)
            row_slots.extend(segment.row_slots)
            wanted.extend(start + row for row in segment.logit_rows)
        padding = self._padding(len(token_ids))
        # Also a pass that wants no logits (a draft taking in a prompt) reads some.
        logits_to_keep = wanted + (wanted[-1:] or [0]) * self._padding(len(wanted))
        output = self.model(
            input_ids=self._tensor(token_ids + [0] * padding)[None],
            position_ids=self._tensor(positions + [0] * padding)[None],
            use_cache=False,
            logits_to_keep=self._tensor(logits_to_keep),
            specdec_pass=_Pass(self.pool, self._tensor(row_slots), packed),
        )
        logits: Tensor = output.logits[0, :, : self.info.vocab_size]  # [wanted + padding, vocab]
        return list(torch.split(logits[: len(wanted)], [len(segment.logit_rows) for segment in segments]))

    def _pack(self, segment: Segment, start: int) -> tuple[list[int], _PackedSegment]:
        num_context, num_rows = len(segment.context_slots), len(segment.token_ids)
        depths: list[int] = []
        for parent in segment.parents:
            depths.append(0 if parent < 0 else depths[parent] + 1)
        positions = [num_context + depth for depth in depths]
        if all(parent == row - 1 for row, parent in enumerate(segment.parents)):
            among_rows = torch.ones(num_rows, num_rows, dtype=torch.bool).tril()
        else:
            among_rows = torch.eye(num_rows, dtype=torch.bool)
            for row, parent in enumerate(segment.parents):
                if parent >= 0:
                    among_rows[row] |= among_rows[parent]
        visible = torch.cat([torch.ones(num_rows, num_context, dtype=torch.bool), among_rows], dim=1)
        key_positions = self._tensor([*range(num_context), *positions])
        return positions, _PackedSegment(
            slice(start, start + num_rows),
            self._tensor([*segment.context_slots, *segment.row_slots]),
            None if num_rows == 1 else visible.to(self.device),
            self._tensor(positions)[:, None] - key_positions[None, :],
        )

    def _padding(self, num_rows: int) -> int:
        """Rows to add for a multiple that is not 0."""
        return -max(num_rows, 1) % self._row_multiple + (num_rows == 0)

    def _tensor(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.device)


def packed_attention(
    module: torch.nn.Module,
    query: Tensor,  # [1, heads, rows, head_dim]
    key: Tensor,  # [1, kv_heads, rows, head_dim]
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    specdec_pass: _Pass,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention of each segment over its own slots. Returns [1, rows, heads, head_dim].

    Segment by segment, so that the order of summation depends on the segment alone.
    """
    num_rows = len(specdec_pass.row_slots)
    layer: int = module.layer_idx  # type: ignore[assignment]
    keys, values = specdec_pass.pool.write(
        layer,
        specdec_pass.row_slots,
        key[0, :, :num_rows].transpose(0, 1),
        value[0, :, :num_rows].transpose(0, 1),
    )
    groups = query.shape[1] // key.shape[1]
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    output = query.new_zeros(query.shape[2], query.shape[1], value.shape[-1])  # [rows, heads, head_dim]
    for segment in specdec_pass.segments:
        segment_query = query[0, :, segment.rows]  # [heads, segment rows, head_dim]
        segment_keys = keys.index_select(0, segment.slots).transpose(0, 1)  # [kv_heads, keys, head_dim]
        segment_values = values.index_select(0, segment.slots).transpose(0, 1)
        visible = segment.visible
        if sliding_window is not None:
            near = segment.distance < sliding_window
            visible = near if visible is None else visible & near
        if softcap is None:
            attended = torch.nn.functional.scaled_dot_product_attention(
                segment_query[None],
                segment_keys[None],
                segment_values[None],
                attn_mask=visible,
                scale=scale,
                enable_gqa=groups > 1,
            )[0]
        else:
            attended = _softcapped(segment_query, segment_keys, segment_values, visible, scale, softcap)
        output[segment.rows] = attended.transpose(0, 1)
    return output[None], None


def _softcapped(
    query: Tensor, keys: Tensor, values: Tensor, visible: Tensor | None, scale: float, softcap: float
) -> Tensor:  # [heads, rows, head_dim]
    groups = query.shape[0] // keys.shape[0]
    scores = query @ keys.repeat_interleave(groups, 0).transpose(1, 2) * scale  # [heads, rows, keys]
    scores = torch.tanh(scores / softcap) * softcap
    if visible is not None:
        scores = scores.masked_fill(~visible, -torch.inf)
    weights = scores.softmax(-1, dtype=torch.float32).to(query.dtype)
    return weights @ values.repeat_interleave(groups, 0)


def load_runner(settings: ModelServiceSettings) -> ModelRunner:
    """Find, check and load the model of a service. Raises ValueError with a sentence for the operator."""
    if settings.threads:
        torch.set_num_threads(settings.threads)
    checkpoint = Checkpoint.find(settings.model, settings.dtype)
    model = AutoModelForCausalLM.from_pretrained(
        checkpoint.directory,
        dtype=getattr(torch, checkpoint.dtype),
        use_safetensors=True,
        trust_remote_code=False,
    )
    return ModelRunner(model, checkpoint.info, settings.kv_slots, settings.device)


AttentionInterface.register(ATTENTION, packed_attention)
