"""The public API over gRPC: checks, admission, API keys, responses.

Imports everything of the orchestrator but control and the loop; the only room that knows GenerationService.
Start at service.py.
"""
