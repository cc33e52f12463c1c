"""gRPC: channels, servers, health, and conversion between messages of the contract and plain values.

Imports core, security, grpc and v1.
Start at wire.py.
"""
