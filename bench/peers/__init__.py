"""``specdec bench peers``: compares our services with transformers, on the same pair of checkpoints.

contender.py defines a contender; transformers_peers.py, in_process.py and services.py have one kind each. prompts.py
makes the prompts, calibration.py finds the best settings, measuring.py lets contenders take turns. comparison.py runs
all of it; ratios.py, table.py and chart.py present the results.
"""
