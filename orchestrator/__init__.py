"""The orchestrator: the loop, its sequences, drafting, the control of draft lengths, replicas, and the public API.

Imports specdec, never torch.
Start at decoder.py: the loop, on one screen.
"""
