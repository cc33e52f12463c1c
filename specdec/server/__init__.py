"""The parts that both model services share: the step loop around a model, streams, draining, liveness.

Imports rooms up to transport; no torch.
Start at step_loop.py, then streams.py.
"""
