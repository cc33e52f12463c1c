"""A deployment on paper: how many drafts a target needs, how much to draft, how fast that is and where it breaks.

Imports core, speculation, passes.prefill and server.batch_delay; runs no model and opens no socket.
Start at scenario.py (what is simulated), then simulation.py; sizing.py asks many of them, command.py is specdec plan.
"""
