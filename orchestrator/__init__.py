"""The orchestrator: the loop, the sequences it owns, who proposes, how much to draft, replicas, and the public API.

Imports specdec, never torch.
Start at decoder.py: the loop, on one screen.
"""
