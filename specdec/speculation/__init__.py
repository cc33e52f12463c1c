"""The speculative algorithm: verification of draft tokens, their expected acceptance, and the growth of trees.

Imports core; torch only in verification.py. Pure functions and counts.
Start at verification.py.
"""
