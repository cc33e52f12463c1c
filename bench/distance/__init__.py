"""``specdec bench distance``: what the way to the draft costs, and how much of it growing ahead hides.

pairs.py and modes.py say what is compared, situations.py where and in which order, lab.py runs it with a proxy on the
way to the draft. row.py is what comes of one mode in one situation; ratios.py, formula.py, table.py and chart.py read
rows.
"""
