"""Certificates: mutual TLS from files, a development CA, and why a handshake failed.

Imports core and grpc.
Start at tls.py.
"""
