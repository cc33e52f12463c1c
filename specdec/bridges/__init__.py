"""Our draft service inside other people's engines, by the hooks that these have for it.

Imports rooms up to transport, and runner.vocabulary. Needs no torch and does not import the engine, which loads it.
Start at vllm.py.
"""
