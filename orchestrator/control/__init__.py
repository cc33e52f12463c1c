"""How many tokens to draft: what rounds cost, the one decision per pass, and what it means for a sequence.

Imports orchestrator.rounds and specdec.speculation; used by decoder and sample alone. Pure: no clock, no I/O.
Start at draft_length.py: K is DraftLength.num_tokens, for all sequences; Adaptive cuts it to a text and grants it.
"""
