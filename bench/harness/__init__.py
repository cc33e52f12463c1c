"""How a benchmark is run: from a shell, with services as processes.

Imports specdec.cli.
Start at deployment.py.
"""
