"""Microbenchmarks of the message path, and the pass times of table models.

Imports specdec and bench.harness.
Start at rounds.py.
"""
