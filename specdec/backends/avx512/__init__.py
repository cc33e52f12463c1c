"""The backend for CPUs with AVX512-BF16: kernels in C, called through ctypes. The C code is frozen.

Imports the rooms before backends, torch and transformers. Another backend, passed to it, computes the rest.
Start at backend.py.
"""
