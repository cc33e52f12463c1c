"""What both model services are made of: the step loop around a model, streams, draining, liveness.

Imports rooms up to transport; no torch.
Start at step_loop.py, then streams.py.
"""
