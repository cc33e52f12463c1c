"""Microbenchmarks of single parts: the message path, the decisions, matrix products with few rows.

Imports specdec and bench.harness.
Start at rounds.py.
"""
