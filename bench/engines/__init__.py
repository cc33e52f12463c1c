"""``specdec bench engines``: vLLM by itself and our services on each engine, with the same checkpoints.

comparisons.py starts them, in_vllm.py is vLLM in a process of its own. parity.py compares texts instead of speeds.
Needs vLLM in the environment.
Start at __main__.py.
"""
