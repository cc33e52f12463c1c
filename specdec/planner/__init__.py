"""A deployment on paper: how many drafts a target needs, how much to draft, how fast that is and where it breaks.

Nothing here runs a model or opens a socket. ``scenario`` says what is simulated, ``simulation`` runs it, ``sizing``
asks many simulations for the best, ``command`` is ``specdec plan``. Standard library only, so that it runs wherever
the command line does.
"""
