"""How a pass is computed: one interface (base.py), and a folder for each set of kernels behind it.

Imports rooms up to passes and sampling; one backend never imports another. ctypes is used here alone.
Start at base.py, then choice.py.
"""
