"""The parts of decoder layers of the common kind, by the names that transformers gives them."""

from __future__ import annotations

from typing import Any

LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj"), ("gate_proj", "up_proj", "down_proj")
NORMS = ("input_layernorm", "post_attention_layernorm"), ("q_norm", "k_norm")


def linears_and_norms(layer: Any) -> tuple[list[Any], list[Any]] | None:
    """The linear layers in the order of LINEARS, and the norms in that of NORMS. Norms of heads may be missing.

    None: the layer lacks parts, or has others.
    """
    parts = dict(layer.named_children())
    if set(parts) != {"self_attn", "mlp", *NORMS[0]}:
        return None
    of_attention, of_mlp = (dict(parts[part].named_children()) for part in ("self_attn", "mlp"))
    if not set(LINEARS[0]) <= set(of_attention) <= {*LINEARS[0], *NORMS[1]}:
        return None
    if set(of_mlp) != {*LINEARS[1], "act_fn"}:
        return None
    linears = [*(of_attention[name] for name in LINEARS[0]), *(of_mlp[name] for name in LINEARS[1])]
    of_heads = [of_attention[name] for name in NORMS[1] if name in of_attention]
    return linears, [*(parts[name] for name in NORMS[0]), *of_heads]
