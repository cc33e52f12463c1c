"""Connections to targets and drafts: pools by name, one stream per replica, health, replay by age.

Imports transport and security; knows neither the loop nor the public API.
Start at pool.py, then replica.py and link.py.
"""
