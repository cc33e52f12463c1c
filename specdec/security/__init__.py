"""Certificates: mutual TLS from files, a development CA, and the diagnosis of failed handshakes.

Imports core and grpc.
Start at tls.py.
"""
