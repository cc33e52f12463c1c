"""The KV cache: the slot of each position of each sequence, and the blocks that several sequences share.

Imports core; torch only in store.py, which holds the tensors.
Start at block_pool.py.
"""
