"""A draft with another vocabulary than its target's.

Imports what drafters/ imports, and language_model.py.
Start at drafter.py, then translation.py.
"""
