"""Each contender's best settings, found by trying: threads and who waits for whom first, then the number of draft
tokens.

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


async def calibrate(
    contender: Contender,
    prompts: Prompts,
    max_tokens: int,
    report: Callable[[str], None] = lambda text: None,
    thorough: bool = True,
) -> Settings:
    """The settings that gave the most tokens per second on these prompts; ``report`` is told what is tried.

    Unless ``thorough`` a short probe alone decides about threads and who waits.

    Every try has the same prompts, and no contender finds anything of them in a cache.
    """
    counts = list(contender.num_draft_tokens)
    middle = counts[len(counts) // 2]
    candidates = [Settings(threads, middle, ahead) for threads, ahead in product(contender.threads, contender.ahead)]
    # Where there is no choice this is still what warms the contender up.
    probed = await _tried(contender, candidates, prompts, _PROBE_TOKENS, report)
    best = max(probed, key=lambda settings: probed[settings])
    if thorough:
        hopeful = [settings for settings in candidates if probed[settings] * _HOPELESS >= probed[best]]
        best = await _fastest(contender, hopeful, prompts, max_tokens, report)
    candidates = [replace(best, num_draft_tokens=count) for count in counts]
    return await _fastest(contender, candidates, prompts, max_tokens, report)


async def _fastest(
    contender: Contender,
    candidates: Sequence[Settings],
    prompts: Prompts,
    max_tokens: int,
    report: Callable[[str], None],
) -> Settings:
    if len(candidates) == 1:
        return candidates[0]
    rates = await _tried(contender, candidates, prompts, max_tokens, report)
    return max(rates, key=lambda settings: rates[settings])


async def _tried(
    contender: Contender,
    candidates: Iterable[Settings],
    prompts: Prompts,
    max_tokens: int,
    report: Callable[[str], None],
) -> dict[Settings, float]:
    """Tokens per second of each."""
    rates = {}
    for settings in candidates:
        report(f"calibrating {contender.name}: {settings}")
        rates[settings] = (await contender.run(settings, prompts, max_tokens)).tokens_per_s
    return rates
