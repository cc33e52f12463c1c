"""The public API over gRPC: checks, admission, API keys, responses.

Imports all of the orchestrator but control and the loop; the only package that knows GenerationService.
Start at service.py.
"""
