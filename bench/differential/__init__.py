"""Random requests with and without speculation, compared field by field.

May import every room; no shipped package imports it.
Start at requests.py.
"""
