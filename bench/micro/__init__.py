"""Microbenchmarks of the message path.

Imports specdec and bench.harness.
Start at rounds.py.
"""
