from specdec.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class VerifyRequest(_message.Message):
    __slots__ = ("opens", "rounds", "closes")
    OPENS_FIELD_NUMBER: _ClassVar[int]
    ROUNDS_FIELD_NUMBER: _ClassVar[int]
    CLOSES_FIELD_NUMBER: _ClassVar[int]
    opens: _containers.RepeatedCompositeFieldContainer[TargetOpen]
    rounds: _containers.RepeatedCompositeFieldContainer[Round]
    closes: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, opens: _Optional[_Iterable[_Union[TargetOpen, _Mapping]]] = ..., rounds: _Optional[_Iterable[_Union[Round, _Mapping]]] = ..., closes: _Optional[_Iterable[int]] = ...) -> None: ...

class TargetOpen(_message.Message):
    __slots__ = ("sequence", "spec", "more", "stop_token_ids", "request_age_ms", "num_preemptions", "num_logprobs", "num_prompt_logprobs", "max_self_draft_nodes", "adapter")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    SPEC_FIELD_NUMBER: _ClassVar[int]
    MORE_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    REQUEST_AGE_MS_FIELD_NUMBER: _ClassVar[int]
    NUM_PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    NUM_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    MAX_SELF_DRAFT_NODES_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    spec: _common_pb2.SequenceSpec
    more: bool
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    request_age_ms: int
    num_preemptions: int
    num_logprobs: int
    num_prompt_logprobs: int
    max_self_draft_nodes: int
    adapter: str
    def __init__(self, sequence: _Optional[int] = ..., spec: _Optional[_Union[_common_pb2.SequenceSpec, _Mapping]] = ..., more: _Optional[bool] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., request_age_ms: _Optional[int] = ..., num_preemptions: _Optional[int] = ..., num_logprobs: _Optional[int] = ..., num_prompt_logprobs: _Optional[int] = ..., max_self_draft_nodes: _Optional[int] = ..., adapter: _Optional[str] = ...) -> None: ...

class Round(_message.Message):
    __slots__ = ("sequence", "number", "base", "tree", "num_autonomous", "max_nodes", "self_draft_nodes")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    BASE_FIELD_NUMBER: _ClassVar[int]
    TREE_FIELD_NUMBER: _ClassVar[int]
    NUM_AUTONOMOUS_FIELD_NUMBER: _ClassVar[int]
    MAX_NODES_FIELD_NUMBER: _ClassVar[int]
    SELF_DRAFT_NODES_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    number: int
    base: int
    tree: _common_pb2.TokenTree
    num_autonomous: int
    max_nodes: int
    self_draft_nodes: int
    def __init__(self, sequence: _Optional[int] = ..., number: _Optional[int] = ..., base: _Optional[int] = ..., tree: _Optional[_Union[_common_pb2.TokenTree, _Mapping]] = ..., num_autonomous: _Optional[int] = ..., max_nodes: _Optional[int] = ..., self_draft_nodes: _Optional[int] = ...) -> None: ...

class VerifyResponse(_message.Message):
    __slots__ = ("verdicts", "progress", "errors", "load", "prompt_logprobs")
    VERDICTS_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    ERRORS_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    verdicts: _containers.RepeatedCompositeFieldContainer[Verdict]
    progress: _containers.RepeatedCompositeFieldContainer[Progress]
    errors: _containers.RepeatedCompositeFieldContainer[_common_pb2.SequenceError]
    load: _common_pb2.Load
    prompt_logprobs: _containers.RepeatedCompositeFieldContainer[PromptLogprobs]
    def __init__(self, verdicts: _Optional[_Iterable[_Union[Verdict, _Mapping]]] = ..., progress: _Optional[_Iterable[_Union[Progress, _Mapping]]] = ..., errors: _Optional[_Iterable[_Union[_common_pb2.SequenceError, _Mapping]]] = ..., load: _Optional[_Union[_common_pb2.Load, _Mapping]] = ..., prompt_logprobs: _Optional[_Iterable[_Union[PromptLogprobs, _Mapping]]] = ...) -> None: ...

class PromptLogprobs(_message.Message):
    __slots__ = ("sequence", "position", "logprobs")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    position: int
    logprobs: _common_pb2.Logprobs
    def __init__(self, sequence: _Optional[int] = ..., position: _Optional[int] = ..., logprobs: _Optional[_Union[_common_pb2.Logprobs, _Mapping]] = ...) -> None: ...

class Verdict(_message.Message):
    __slots__ = ("sequence", "round", "base", "accepted", "next_token", "timings", "num_autonomous_left", "dropped_round", "refused", "logprobs", "num_cached_tokens", "self_draft")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    BASE_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    NEXT_TOKEN_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    NUM_AUTONOMOUS_LEFT_FIELD_NUMBER: _ClassVar[int]
    DROPPED_ROUND_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SELF_DRAFT_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    round: int
    base: int
    accepted: _containers.RepeatedScalarFieldContainer[int]
    next_token: int
    timings: Timings
    num_autonomous_left: int
    dropped_round: int
    refused: bool
    logprobs: _common_pb2.Logprobs
    num_cached_tokens: int
    self_draft: _common_pb2.TokenTree
    def __init__(self, sequence: _Optional[int] = ..., round: _Optional[int] = ..., base: _Optional[int] = ..., accepted: _Optional[_Iterable[int]] = ..., next_token: _Optional[int] = ..., timings: _Optional[_Union[Timings, _Mapping]] = ..., num_autonomous_left: _Optional[int] = ..., dropped_round: _Optional[int] = ..., refused: _Optional[bool] = ..., logprobs: _Optional[_Union[_common_pb2.Logprobs, _Mapping]] = ..., num_cached_tokens: _Optional[int] = ..., self_draft: _Optional[_Union[_common_pb2.TokenTree, _Mapping]] = ...) -> None: ...

class Timings(_message.Message):
    __slots__ = ("queue_us", "pass_us", "sample_us", "rows", "sequences", "self_draft_us")
    QUEUE_US_FIELD_NUMBER: _ClassVar[int]
    PASS_US_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_US_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    SELF_DRAFT_US_FIELD_NUMBER: _ClassVar[int]
    queue_us: int
    pass_us: int
    sample_us: int
    rows: int
    sequences: int
    self_draft_us: int
    def __init__(self, queue_us: _Optional[int] = ..., pass_us: _Optional[int] = ..., sample_us: _Optional[int] = ..., rows: _Optional[int] = ..., sequences: _Optional[int] = ..., self_draft_us: _Optional[int] = ...) -> None: ...

class Progress(_message.Message):
    __slots__ = ("sequence", "passes")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    PASSES_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    passes: int
    def __init__(self, sequence: _Optional[int] = ..., passes: _Optional[int] = ...) -> None: ...
