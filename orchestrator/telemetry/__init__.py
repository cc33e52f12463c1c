"""Metrics of the orchestrator's rounds, queue and replicas.

Imports the loop and replicas, and only reads them; RoundClock stands between the loop and the client of the target.
Start at metrics.py.
"""
