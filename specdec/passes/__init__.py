"""A pass as data: its rows, what it returns, and how much of whose prompt goes into it.

Imports core and kvcache; torch only in outputs.py.
Start at rows.py.
"""
