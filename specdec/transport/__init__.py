"""gRPC: channels, servers, health, and the messages of the contract read into plain values.

Imports core, security, grpc and v1.
Start at wire.py.
"""
