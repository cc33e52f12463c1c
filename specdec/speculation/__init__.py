"""The algorithm: which draft tokens survive, how likely each was to, and where a tree grows next.

Imports core; torch only in verification.py. Pure functions and counts.
Start at verification.py.
"""
