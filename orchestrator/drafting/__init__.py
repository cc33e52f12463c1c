"""Drafting: the speculation trie of a sequence, and the client of the draft service that grows it.

Imports replicas and the values of the orchestrator.
Start at speculation.py.
"""
