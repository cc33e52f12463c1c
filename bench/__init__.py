"""Commands that measure every figure in the documentation. RESULTS.md has the current figures, LOG.md the history.

May import everything; no shipped package imports it.
Start at micro/rounds.py.
"""
