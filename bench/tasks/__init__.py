"""Which method of drafting pays for which task. Knows questions and methods; does not know how a method works."""
