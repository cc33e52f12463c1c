"""Runs benchmarks from a shell, with the services as processes.

Imports specdec.cli.
Start at deployment.py.
"""
