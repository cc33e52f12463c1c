"""Checkpoints for measurements that are as slow as real ones.

Imports the interfaces of both services.
Start at damped_pair.py.
"""
