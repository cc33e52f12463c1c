from specdec.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GrowthEnd(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    GROWTH_END_UNSPECIFIED: _ClassVar[GrowthEnd]
    GROWTH_END_BUDGET: _ClassVar[GrowthEnd]
    GROWTH_END_CONTEXT: _ClassVar[GrowthEnd]
    GROWTH_END_UNLIKELY: _ClassVar[GrowthEnd]
    GROWTH_END_SUPERSEDED: _ClassVar[GrowthEnd]
GROWTH_END_UNSPECIFIED: GrowthEnd
GROWTH_END_BUDGET: GrowthEnd
GROWTH_END_CONTEXT: GrowthEnd
GROWTH_END_UNLIKELY: GrowthEnd
GROWTH_END_SUPERSEDED: GrowthEnd

class DraftRequest(_message.Message):
    __slots__ = ("opens", "advances", "closes")
    OPENS_FIELD_NUMBER: _ClassVar[int]
    ADVANCES_FIELD_NUMBER: _ClassVar[int]
    CLOSES_FIELD_NUMBER: _ClassVar[int]
    opens: _containers.RepeatedCompositeFieldContainer[DraftOpen]
    advances: _containers.RepeatedCompositeFieldContainer[Advance]
    closes: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, opens: _Optional[_Iterable[_Union[DraftOpen, _Mapping]]] = ..., advances: _Optional[_Iterable[_Union[Advance, _Mapping]]] = ..., closes: _Optional[_Iterable[int]] = ...) -> None: ...

class DraftOpen(_message.Message):
    __slots__ = ("sequence", "spec", "more", "budget")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    SPEC_FIELD_NUMBER: _ClassVar[int]
    MORE_FIELD_NUMBER: _ClassVar[int]
    BUDGET_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    spec: _common_pb2.SequenceSpec
    more: bool
    budget: DraftBudget
    def __init__(self, sequence: _Optional[int] = ..., spec: _Optional[_Union[_common_pb2.SequenceSpec, _Mapping]] = ..., more: _Optional[bool] = ..., budget: _Optional[_Union[DraftBudget, _Mapping]] = ...) -> None: ...

class DraftBudget(_message.Message):
    __slots__ = ("max_nodes", "max_depth", "max_ahead", "max_siblings")
    MAX_NODES_FIELD_NUMBER: _ClassVar[int]
    MAX_DEPTH_FIELD_NUMBER: _ClassVar[int]
    MAX_AHEAD_FIELD_NUMBER: _ClassVar[int]
    MAX_SIBLINGS_FIELD_NUMBER: _ClassVar[int]
    max_nodes: int
    max_depth: int
    max_ahead: int
    max_siblings: int
    def __init__(self, max_nodes: _Optional[int] = ..., max_depth: _Optional[int] = ..., max_ahead: _Optional[int] = ..., max_siblings: _Optional[int] = ...) -> None: ...

class Advance(_message.Message):
    __slots__ = ("sequence", "number", "token_ids", "base", "in_flight", "budget")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    BASE_FIELD_NUMBER: _ClassVar[int]
    IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    BUDGET_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    number: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    base: int
    in_flight: _common_pb2.TokenTree
    budget: DraftBudget
    def __init__(self, sequence: _Optional[int] = ..., number: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., base: _Optional[int] = ..., in_flight: _Optional[_Union[_common_pb2.TokenTree, _Mapping]] = ..., budget: _Optional[_Union[DraftBudget, _Mapping]] = ...) -> None: ...

class DraftResponse(_message.Message):
    __slots__ = ("growths", "errors", "load")
    GROWTHS_FIELD_NUMBER: _ClassVar[int]
    ERRORS_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    growths: _containers.RepeatedCompositeFieldContainer[Growth]
    errors: _containers.RepeatedCompositeFieldContainer[_common_pb2.SequenceError]
    load: _common_pb2.Load
    def __init__(self, growths: _Optional[_Iterable[_Union[Growth, _Mapping]]] = ..., errors: _Optional[_Iterable[_Union[_common_pb2.SequenceError, _Mapping]]] = ..., load: _Optional[_Union[_common_pb2.Load, _Mapping]] = ...) -> None: ...

class Growth(_message.Message):
    __slots__ = ("sequence", "advance", "base", "path", "tree", "end")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    ADVANCE_FIELD_NUMBER: _ClassVar[int]
    BASE_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    TREE_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    advance: int
    base: int
    path: _containers.RepeatedScalarFieldContainer[int]
    tree: _common_pb2.TokenTree
    end: GrowthEnd
    def __init__(self, sequence: _Optional[int] = ..., advance: _Optional[int] = ..., base: _Optional[int] = ..., path: _Optional[_Iterable[int]] = ..., tree: _Optional[_Union[_common_pb2.TokenTree, _Mapping]] = ..., end: _Optional[_Union[GrowthEnd, str]] = ...) -> None: ...
