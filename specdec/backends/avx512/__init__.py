"""The backend for CPUs with AVX512-BF16: kernels in C, called through ctypes. The C is frozen.

Imports the rooms before backends, torch and transformers; what it does not take, it is given a backend for.
Start at backend.py.
"""
