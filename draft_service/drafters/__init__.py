"""One file per method of drafting, with two verbs: learn the committed ids, and grow.

Imports specdec and draft_service.drafter.
Start at language_model.py.
"""
