"""``specdec bench drafts``: drafts of one target beside each other."""
