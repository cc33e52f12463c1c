"""``specdec bench peers``: our services beside what transformers offers for the same pair of checkpoints.

contender.py says what a contender is; transformers_peers.py, continuous.py, in_process.py and services.py have one kind
each, the last with logged_service.py as its processes and pass_log.py as what they write. prompts.py says what all are
asked, calibration.py finds each one's best settings, measuring.py lets them take turns, packed.py and latency.py
measure what has no peer, comparison.py has all of it in order. ratios.py, table.py and chart.py show what came of it.
"""
