"""The kinds of heads that can be trained, by the names of ``--kind``. What they have in common:

- ``TITLE`` on the model card; ``STEPS``, the published number of steps; ``DECAY``, the weight of a step by that before;
- ``boundaries``: the states between the target's layers that it reads beside the last one;
- ``Kind(config, output, steps)``: ``config`` is the target's, ``output`` the rows of its output embedding that the head
  can draw, [draft vocabulary, d]; they are not trained;
- ``start_from(model)``: the weights before the first step;
- ``unroll(embedded, found)``: the states of all steps, as if each row began a growth of its own. Row t of ``embedded``,
  [batch, rows, d], has token t + 1, and step k there predicts token t + 2 + k;
- ``logits(states)``, [..., draft vocabulary];
- ``files(config, ids, tied)``: what its folder has beside the trained weights. ``ids`` are the target's ids of the rows
  of ``output``, ascending; those rows are left out where ``tied``.
"""

from __future__ import annotations

from models.training.heads.eagle3 import Eagle3
from models.training.heads.medusa import Medusa
from models.training.heads.redrafter import ReDrafter

Head = Eagle3 | Medusa | ReDrafter

KINDS: dict[str, type[Eagle3] | type[Medusa] | type[ReDrafter]] = {
    "eagle3": Eagle3,
    "medusa": Medusa,
    "redrafter": ReDrafter,
}
