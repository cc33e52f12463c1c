"""Simulates deployments: how many drafts a target needs, how much to draft, the speed, and the sustainable load.

Imports core, speculation, passes.prefill and server.batch_delay; runs no model and opens no socket.
Start at scenario.py (the input), then simulation.py; sizing.py runs many simulations, command.py is specdec plan.
"""
