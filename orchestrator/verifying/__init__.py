"""Verifying: the client of the target service, and the rounds that a sequence has in flight there.

Imports replicas and the values of the orchestrator.
Start at target_client.py.
"""
