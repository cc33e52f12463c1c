"""How much to draft, from what rounds have taken and what was accepted. No clock, no I/O.

Imports core, speculation and the values of the orchestrator.
Start at controller.py.
"""
