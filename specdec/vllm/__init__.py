"""vLLM as the engine of a model service: tensor and pipeline parallelism, quantised models, CUDA graphs.

Imports vllm, which only the extra of that name installs; specdec.core, specdec.runner. engine.py has all that touches
vLLM's private parts. Start at engine.py.
"""
