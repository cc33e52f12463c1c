"""``specdec bench distance``: the cost of the round trip to the draft, and the part that growing ahead hides.

pairs.py and modes.py define what is compared, situations.py where and in which order. lab.py runs it, with a proxy in
front of the draft. row.py has the result of one mode in one situation; ratios.py, formula.py, table.py and chart.py
read rows.
"""
