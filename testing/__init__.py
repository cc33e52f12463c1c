"""Equipment that tests, ``specdec chaos`` and benchmarks share: table models, processes to break, hostile peers.

Imports everything that is shipped; neither tests nor bench.
Start at lab.py.
"""
