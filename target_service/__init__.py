"""The target service: verifies token trees, one packed pass for all sequences that wait.

Imports specdec; torch only in language_model.py and decision.py.
Start at engine.py, then language_model.py.
"""
