"""One part at a time: the message path, deciding, products of few rows.

Imports specdec and bench.harness.
Start at rounds.py.
"""
