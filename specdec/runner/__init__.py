"""A model that runs: from a checkpoint to one that was proved, with a KV pool that fits into memory.

Imports rooms up to backends, torch and transformers.
Start at model_runner.py, then loading.py.
"""
