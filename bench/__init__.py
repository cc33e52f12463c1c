"""Every number that the documentation claims, by a command; LOG.md is their history, RESULTS.md the current ones.

Imports everything; nothing that is shipped imports it.
Start at micro/rounds.py.
"""
