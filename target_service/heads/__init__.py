"""Heads: small drafters that read the target's hidden states, and run in the same process.

Imports specdec.backends, specdec.core, specdec.kvcache, specdec.passes, specdec.runner and target_service.self_draft.
Start at proof.py, then layer_head.py and medusa.py.
"""
