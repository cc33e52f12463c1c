"""``specdec bench control``: the policy for how much to draft, in simulated time, over a grid of deployments.

Imports testing.round_simulation and bench.harness.
Start at grid.py (the deployments).
"""
