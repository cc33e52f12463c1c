"""The command line: services, requests, diagnosis, keys and certificates; bench, chaos and train need a checkout.

Imports specdec alone; runs services as processes and never imports them.
Start at main.py.
"""
