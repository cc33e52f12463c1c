"""``specdec bench distance``: the cost of the round trip to the draft, and the part that growing ahead hides.

modes.py and situations.py define what is compared, and where; lab.py serves it, with a proxy in front of the draft.
row.py has the result of one mode in one situation, which formula.py predicts.
Start at __main__.py.
"""
