"""Finds each contender's best settings: threads, whether the draft grows ahead, and the number of draft tokens.

Knows the search; does not know what a contender does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import product

from bench.peers.contender import Contender, Prompts, Settings

_PROBE_TOKENS = 4
_MAX_SLOWDOWN = 1.5
"""Settings that take more than this times the time of the best ones in a short probe are dropped: two threads on a busy
core can take a hundred times as long as one."""

_MIN_RETRY_SHARE = 0.9
"""Settings with at least this share of the best speed are tried once more, with twice as many tokens. An adaptive
contender has learnt something by then."""


async def calibrate(
    contender: Contender,
    texts: Sequence[Prompts],
    max_tokens: int,
    report: Callable[[str], None] = lambda text: None,
    thorough: bool = True,
) -> Settings:
    """The settings with the most tokens per second over ``texts``, each of which all candidates continue in turn;
    ``report`` gets each trial.

    Good settings of a short probe are tried with every number of draft tokens, because the best number differs between
    a synchronous draft and one that grows ahead. Unless ``thorough``, which takes long, the probe alone decides about
    threads and growing ahead.

    All trials have the same prompts, and no contender finds them in a cache.
    """
    counts = list(contender.num_draft_tokens)
    middle = counts[len(counts) // 2]
    candidates = [Settings(threads, middle, ahead) for threads, ahead in product(contender.threads, contender.ahead)]
    # Also without a choice, as the warm-up of the contender.
    probed = await _tried(contender, candidates, texts[:1], _PROBE_TOKENS, report)
    best = max(probed.values())
    hopeful = [settings for settings in candidates if probed[settings] * (_MAX_SLOWDOWN if thorough else 1.0) >= best]
    candidates = [replace(settings, num_draft_tokens=count) for settings, count in product(hopeful, counts)]
    if len(candidates) == 1:
        return candidates[0]
    rates = await _tried(contender, candidates, texts, max_tokens, report)
    close = [settings for settings in candidates if rates[settings] >= _MIN_RETRY_SHARE * max(rates.values())]
    if thorough and len(close) > 1:
        rates = await _tried(contender, close, texts, 2 * max_tokens, report)
    return max(rates, key=lambda settings: rates[settings])


async def _tried(
    contender: Contender,
    candidates: Iterable[Settings],
    texts: Sequence[Prompts],
    max_tokens: int,
    report: Callable[[str], None],
) -> dict[Settings, float]:
    """Tokens per second of each candidate over all texts."""
    tokens, seconds = dict.fromkeys(candidates, 0), dict.fromkeys(candidates, 0.0)
    for prompts, settings in product(texts, tokens):
        report(f"calibrating {contender.name}: {settings}")
        run = await contender.run(settings, prompts, max_tokens)
        tokens[settings] += sum(map(len, run.outputs))
        seconds[settings] += run.seconds
    return {settings: tokens[settings] / seconds[settings] for settings in tokens}
