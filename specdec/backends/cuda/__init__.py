"""The backend for GPUs: a pass as a description in memory that never moves, captured as a CUDA graph. Not yet measured.

Imports the rooms before backends, torch and transformers; triton in kernels.py alone, which only a GPU and tests load.
Start at plan.py, then static_pass.py.
"""
