"""``specdec bench peers``: compares our services with transformers, on the same pair of checkpoints.

contender.py defines a contender; transformers_peers.py, in_process.py and services.py have one kind each. services.py
starts logged_service.py, which writes the log of pass_log.py. prompts.py makes the prompts, calibration.py finds the
best settings, measuring.py lets contenders take turns, latency.py measures properties without a peer. comparison.py
runs all of it; ratios.py, table.py and chart.py present the results.
"""
