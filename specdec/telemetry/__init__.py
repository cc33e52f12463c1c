"""Logs, metrics and traces: how they get out of a process, and what every process says of itself.

Imports core and opentelemetry.
Start at setup.py.
"""
