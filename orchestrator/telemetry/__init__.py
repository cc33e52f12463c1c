"""What the orchestrator tells of its rounds, its queue and its replicas.

Imports the loop and replicas, reads them, changes nothing.
Start at metrics.py.
"""
