"""Logs, metrics and traces: how a process exports them, and the metrics that every process has.

Imports core and opentelemetry.
Start at setup.py.
"""
