"""``specdec bench control``: the policy for how much to draft, in simulated time, over a grid of deployments.

Imports orchestrator.control and bench.harness; a test of the policy may import the simulator.
Start at grid.py (the deployments), then testing/round_simulation.py.
"""
