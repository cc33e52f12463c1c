"""The order of a head's candidates: by log q plus the noise of the target's own draw, so that coupled draws are met."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from specdec.core.sequence import Draw
from specdec.sampling.confidence import confidence_of
from specdec.sampling.ranking import ranked
from target_service.self_draft.trees import NO_CANDIDATES, NUM_CHILDREN, Candidates

Rank = Callable[[Tensor, Sequence[Draw], int, Tensor], tuple[Tensor, Tensor]]
"""See specdec.sampling.ranking.ranked, and specdec.backends.base.Backend.leaders."""


def ranked_candidates(
    logits: Tensor, ids: Tensor, draws: Sequence[Draw], *, num_children: int = NUM_CHILDREN, rank: Rank = ranked
) -> list[Candidates]:
    """Those of each row of logits [rows, draft vocabulary], of which ``ids``, [draft vocabulary] or one for each logit,
    are the target's. ``draws``: the target's own. None in a row with NaN or infinity."""
    tokens, scores = rank(logits, draws, num_children, ids)
    # Copied from the device once each, for all rows.
    sound = logits.isfinite().all(-1)
    rows = zip(tokens.tolist(), sound.tolist(), confidence_of(scores).tolist(), strict=True)
    return [Candidates(children, confidence) if sound else NO_CANDIDATES for children, sound, confidence in rows]
