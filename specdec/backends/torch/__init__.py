"""The backend that runs everywhere: torch's kernels on any device, oneDNN's packed weights on CPUs.

Imports the rooms before backends, torch and transformers.
Start at backend.py.
"""
