"""The command line: serve, up, demo, generate, doctor, plan, bench and chaos.

Imports all rooms except runner, backends and server internals; runs services as processes and never imports them.
Start at main.py.
"""
