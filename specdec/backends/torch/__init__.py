"""The backend for every device: torch's kernels, with oneDNN's packed weights on CPUs.

Imports the rooms before backends, torch and transformers.
Start at backend.py.
"""
