"""What all services share: values on the wire, the algorithm, passes, streams, the client and the command line.

Imports no service; a room imports only rooms before it (the order is in tests/test_architecture.py).
Start at core/tree.py, then speculation/verification.py; clients at client.py.
"""
