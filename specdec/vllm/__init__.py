"""vLLM as the engine of a model service: tensor parallelism, also over machines, quantised models, CUDA graphs.

Imports vllm, which the extra of that name installs, and rooms up to runner and server. engine.py and the worker*.py
alone have what touches vLLM's private parts; the samplers of our services run in its workers.
Start at engine.py.
"""
