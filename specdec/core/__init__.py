"""Values and pure functions: trees, sequences, rounds, errors, settings, keyed noise, limits.

Imports the standard library, pydantic, numpy and google.rpc; torch only where noise is drawn, at call time.
Start at tree.py (the one data structure), then rounds.py (the messages between the services).
"""
