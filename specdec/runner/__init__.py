"""A running model: its checkpoint, loading, the probe that it works, and a KV pool that fits into memory.

Imports rooms up to backends, torch and transformers.
Start at model_runner.py, then loading.py.
"""
