"""The cuda backend on a GPU, stage by stage: see run.py. Needs Python, torch, triton and transformers alone."""
