"""Heads: small drafters that read the target's hidden states, and run beside it.

Imports specdec.backends, specdec.core, specdec.kvcache, specdec.passes, specdec.runner, specdec.sampling and
specdec.speculation.
Start at own_trees.py, then recurrent.py.
"""
