"""The draft service: grows token tries for the orchestrator.

Imports specdec; torch only in drafters/.
Start at engine.py, then drafters/language_model.py.
"""
