"""One file per method of drafting, with two verbs: grow, and learn the outcome.

Imports specdec and draft_service.drafter.
Start at language_model.py.
"""
