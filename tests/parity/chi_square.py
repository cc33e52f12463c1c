"""Pearson's chi-square test, with rare cells put together."""

from __future__ import annotations

import numpy as np
from scipy.stats import chi2


def p_value(observed: np.ndarray, expected: np.ndarray) -> float:
    """That counts as far off as ``observed`` come from the law that expects ``expected`` (same shape and sum).

    Cells are put together until each expects at least five. What cannot happen must not have happened.
    """
    observed, expected = observed.ravel(), expected.ravel()
    assert np.isclose(observed.sum(), expected.sum())
    if observed[expected == 0].any():
        return 0.0
    order = np.argsort(expected, kind="stable")
    groups: list[list[float]] = [[0.0, 0.0]]
    for cell in order:
        if groups[-1][1] >= 5:
            groups.append([0.0, 0.0])
        groups[-1][0] += observed[cell]
        groups[-1][1] += expected[cell]
    counts, means = np.array(groups if groups[-1][1] >= 5 else groups[:-1]).T
    statistic = ((counts - means) ** 2 / means).sum()
    return float(chi2.sf(statistic, len(counts) - 1))
