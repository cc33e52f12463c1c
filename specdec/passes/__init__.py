"""A pass as data: its rows, its outputs, and each sequence's share of prompt rows.

Imports core and kvcache; torch only in outputs.py.
Start at rows.py.
"""
