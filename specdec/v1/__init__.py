"""The contract as Python: generated from protos/ by `make protos`, never edited.

Imports protobuf and grpc.
Start at protos/specdec/v1/.
"""
