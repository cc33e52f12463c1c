"""Commands that measure every figure in the documentation. RESULTS.md has the current figures, LOG.md what was tried.

May import everything; no shipped package imports it.
Start at harness/runner.py.
"""
