"""The computation of a pass: one interface (base.py), and a folder for each backend that implements it.

Imports rooms up to passes and sampling; one backend never imports another. Only this room uses ctypes.
Start at base.py, then choice.py.
"""
