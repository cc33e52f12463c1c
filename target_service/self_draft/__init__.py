"""What a target drafts by itself, in the same process: self-drafts, by heads or without weights.

Imports specdec.backends, specdec.core, specdec.kvcache, specdec.passes, specdec.sampling and specdec.speculation.
Start at trees.py.
"""
