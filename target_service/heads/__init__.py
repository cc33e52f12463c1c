"""Heads: small drafters that read the target's hidden states, and run beside it."""
