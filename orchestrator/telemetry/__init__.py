"""Metrics of the orchestrator's rounds, queue and replicas.

Imports the loop and replicas, and only reads them.
Start at metrics.py.
"""
