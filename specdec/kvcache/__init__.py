"""The KV cache: which slot holds which position of which sequence, and which blocks several sequences share.

Imports core; torch only in store.py, which holds the tensors.
Start at block_pool.py.
"""
