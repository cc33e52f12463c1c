"""From logits to a token: penalties and grammar, distributions, draws with keyed noise.

Imports core and torch. Rows of many sequences are one batch, and no row depends on another.
Start at distributions.py.
"""
