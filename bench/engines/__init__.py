"""``specdec bench engines``: vLLM alone and our services on each engine, with the same checkpoints.

in_vllm.py is vLLM in a process of its own, and generators.py talks to it. parity.py compares texts instead of speeds.
Needs vLLM in the environment.
Start at __main__.py.
"""
