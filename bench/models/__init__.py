"""Models for measurements: a table model without torch behind the real services, and checkpoints as slow as real ones.

Imports the interfaces of both services.
Start at table_model.py.
"""
