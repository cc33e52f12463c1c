"""Sampling: penalties and grammar on the logits, distributions, draws with keyed noise.

Imports core and torch. Rows of many sequences form one batch, and no row depends on another.
Start at distributions.py.
"""
