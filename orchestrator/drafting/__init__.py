"""Who proposes: the trie of a sequence, and the client of the draft service that makes it grow.

Imports replicas and the values of the orchestrator.
Start at speculation.py.
"""
