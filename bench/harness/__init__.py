"""The runner of benchmarks: services as processes or what is running, questions by name, turns, tables, files, charts.

Imports specdec.cli.
Start at runner.py; ../tasks.py is a short use of it.
"""
