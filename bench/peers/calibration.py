"""Each contender's best settings, found by trying: threads, who waits for whom, and the number of draft tokens.

Knows how to try; refuses to know what a contender does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import product

from bench.peers.contender import Contender, Prompts, Settings

_PROBE_TOKENS = 4
_HOPELESS = 1.5
"""Settings that take so many times as long as the best of a short probe are not tried at length: two threads on a busy
core can take a hundred times as long as one."""

_CLOSE = 0.9
"""Of the best: what comes so close is tried once more, with twice as many tokens. What chooses as it goes has learnt
something by then."""


async def calibrate(
    contender: Contender,
    texts: Sequence[Prompts],
    max_tokens: int,
    report: Callable[[str], None] = lambda text: None,
    thorough: bool = True,
) -> Settings:
    """The settings that gave the most tokens per second over ``texts``, each continued by all candidates in turn;
    ``report`` is told what is tried.

    What looks hopeful in a short probe is tried with every number of draft tokens, as a draft that goes on while the
    target verifies is best with another number than one that waits. Unless ``thorough``, which takes long, the probe
    alone decides about threads and who waits.

    Every try has the same prompts, and no contender finds anything of them in a cache.
    """
    counts = list(contender.num_draft_tokens)
    middle = counts[len(counts) // 2]
    candidates = [Settings(threads, middle, ahead) for threads, ahead in product(contender.threads, contender.ahead)]
    # Where there is no choice this is still what warms the contender up.
    probed = await _tried(contender, candidates, texts[:1], _PROBE_TOKENS, report)
    best = max(probed.values())
    hopeful = [settings for settings in candidates if probed[settings] * (_HOPELESS if thorough else 1.0) >= best]
    candidates = [replace(settings, num_draft_tokens=count) for settings, count in product(hopeful, counts)]
    if len(candidates) == 1:
        return candidates[0]
    rates = await _tried(contender, candidates, texts, max_tokens, report)
    close = [settings for settings in candidates if rates[settings] >= _CLOSE * max(rates.values())]
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
    """Tokens per second of each, over all texts."""
    tokens, seconds = dict.fromkeys(candidates, 0), dict.fromkeys(candidates, 0.0)
    for prompts, settings in product(texts, tokens):
        report(f"calibrating {contender.name}: {settings}")
        run = await contender.run(settings, prompts, max_tokens)
        tokens[settings] += sum(map(len, run.outputs))
        seconds[settings] += run.seconds
    return {settings: tokens[settings] / seconds[settings] for settings in tokens}
