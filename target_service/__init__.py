"""The target service: verifies token trees, with one packed pass for all waiting sequences.

Imports specdec; torch only in language_model.py, decision.py, reports.py, vllm_sampler.py, own and heads.
Start at engine.py, then language_model.py, then self_draft/trees.py.
"""
