"""What all services share: the values on the wire, the algorithm, passes, streams, the client and the command line.

A room imports only rooms before it (tests/test_architecture.py has the order); no service is imported from here.
Start at core/tree.py, then speculation/verification.py.
"""
