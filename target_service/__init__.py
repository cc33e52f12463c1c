"""The target service: verifies token trees, with one packed pass for all waiting sequences.

Imports specdec; torch in language_model.py, tasks.py, slow_grammars.py, decision.py, reports.py, vllm_decisions.py,
self_draft and heads alone.
Start at engine.py, then language_model.py, then self_draft/trees.py.
"""
