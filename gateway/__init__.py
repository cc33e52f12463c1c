"""OpenAI's API over HTTP, in front of orchestrators: translates, and keeps nothing.

Imports specdec alone, without torch. A stream survives the loss of an orchestrator, as specdec.client does.
Start at app.py; a request then goes through reading, parsing, bodies, translation, sources and specdec.client.
"""
