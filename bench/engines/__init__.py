"""``specdec bench engines``: vLLM alone and our services on each engine, with the same checkpoints.

in_vllm.py is vLLM in a process of its own, generators.py talks to it; services.py has our services on an engine.
turns.py lets these contenders take turns; table.py shows the speeds. parity.py compares texts instead. pairs.py has the
checkpoints and prompts. Needs vLLM in the environment.
Start at __main__.py.
"""
