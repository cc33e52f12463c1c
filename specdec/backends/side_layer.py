"""A decoder layer next to a model, such as that of a head. Its attention may read other, wider rows than those that its
output is added to.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specdec.backends.layer_options import LayerOptions
from specdec.backends.packed_pass import PackedPass
from specdec.core.device import indices


class SideLayer(nn.Module):
    """``to_heads``: to queries, keys and values side by side; ``to_features``: to gates and what they let through.
    ``norm`` [hidden_size]: of the RMS norm before these. A backend may replace the linear layers, or all of it."""

    def __init__(
        self, options: LayerOptions, *, to_heads: Any, o_proj: Any, norm: Tensor, to_features: Any, down_proj: Any
    ) -> None:
        super().__init__()
        self.options = options
        self.to_heads, self.o_proj, self.to_features, self.down_proj = to_heads, o_proj, to_features, down_proj
        self.norm = nn.Parameter(norm, requires_grad=False)
        self._rates = options.rates.to(norm.device)

    @property
    def widths(self) -> tuple[int, int, int]:
        """Of a row's queries, keys and values."""
        wide = self.options.num_heads * self.options.head_dim
        narrow = (self.to_heads.out_features - wide) // 2
        return wide, narrow, narrow

    def forward(
        self,
        inputs: Tensor,  # [rows, width]: normed, for the attention
        states: Tensor,  # [rows, hidden_size]
        packed_pass: PackedPass,
        *,
        layer: int,
    ) -> Tensor:  # [rows, hidden_size]
        """The states after the layer. Stores the rows' keys and values as those of ``layer``."""
        options = self.options
        angles = indices(packed_pass.rows.positions, states.device)[:, None].float() * self._rates
        cos, sin = ((options.rotary_scale * part).to(inputs.dtype)[:, None] for part in (angles.cos(), angles.sin()))
        query, key, value = (
            part.view(len(inputs), -1, options.head_dim) for part in self.to_heads(inputs).split(self.widths, -1)
        )
        query, key, scale = _rotated(query, cos, sin), _rotated(key, cos, sin), 1 / math.sqrt(options.head_dim)
        attended = packed_pass.attend(
            layer, query, key, value=value.contiguous(), scale=scale, window=options.window, softcap=None
        )
        states = states + self.o_proj(attended.flatten(1))
        gate, up = self.to_features(F.rms_norm(states, self.norm.shape, self.norm, eps=options.eps)).chunk(2, -1)
        outputs: Tensor = states + self.down_proj(options.activation(gate) * up)
        return outputs


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
