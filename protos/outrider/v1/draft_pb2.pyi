from protos.outrider.v1 import sampling_pb2 as _sampling_pb2
from protos.outrider.v1 import target_pb2 as _target_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Hello(_message.Message):
    __slots__ = ("protocol_version", "noise_version", "instance_id", "token_table_hash", "vocab_size", "weights_fingerprint", "limits", "capabilities")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    NOISE_VERSION_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_TABLE_HASH_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    CAPABILITIES_FIELD_NUMBER: _ClassVar[int]
    protocol_version: ProtocolVersion
    noise_version: int
    instance_id: str
    token_table_hash: bytes
    vocab_size: int
    weights_fingerprint: str
    limits: Limits
    capabilities: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, protocol_version: _Optional[_Union[ProtocolVersion, _Mapping]] = ..., noise_version: _Optional[int] = ..., instance_id: _Optional[str] = ..., token_table_hash: _Optional[bytes] = ..., vocab_size: _Optional[int] = ..., weights_fingerprint: _Optional[str] = ..., limits: _Optional[_Union[Limits, _Mapping]] = ..., capabilities: _Optional[_Iterable[str]] = ...) -> None: ...

class ProtocolVersion(_message.Message):
    __slots__ = ("major", "minor")
    MAJOR_FIELD_NUMBER: _ClassVar[int]
    MINOR_FIELD_NUMBER: _ClassVar[int]
    major: int
    minor: int
    def __init__(self, major: _Optional[int] = ..., minor: _Optional[int] = ...) -> None: ...

class Limits(_message.Message):
    __slots__ = ("max_sequences", "max_len", "max_window", "max_frame_bytes")
    MAX_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    MAX_LEN_FIELD_NUMBER: _ClassVar[int]
    MAX_WINDOW_FIELD_NUMBER: _ClassVar[int]
    MAX_FRAME_BYTES_FIELD_NUMBER: _ClassVar[int]
    max_sequences: int
    max_len: int
    max_window: int
    max_frame_bytes: int
    def __init__(self, max_sequences: _Optional[int] = ..., max_len: _Optional[int] = ..., max_window: _Optional[int] = ..., max_frame_bytes: _Optional[int] = ...) -> None: ...

class SpeculateRequest(_message.Message):
    __slots__ = ("hello", "updates")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    UPDATES_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    updates: _containers.RepeatedCompositeFieldContainer[SequenceUpdate]
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., updates: _Optional[_Iterable[_Union[SequenceUpdate, _Mapping]]] = ...) -> None: ...

class SpeculateResponse(_message.Message):
    __slots__ = ("hello", "proposals", "gone", "load")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    PROPOSALS_FIELD_NUMBER: _ClassVar[int]
    GONE_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    proposals: _containers.RepeatedCompositeFieldContainer[Proposal]
    gone: _containers.RepeatedCompositeFieldContainer[SequenceGone]
    load: _target_pb2.DrafterLoad
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., proposals: _Optional[_Iterable[_Union[Proposal, _Mapping]]] = ..., gone: _Optional[_Iterable[_Union[SequenceGone, _Mapping]]] = ..., load: _Optional[_Union[_target_pb2.DrafterLoad, _Mapping]] = ...) -> None: ...

class SequenceUpdate(_message.Message):
    __slots__ = ("sequence_id", "epoch", "update_seq", "base_len", "tokens", "window", "finished", "open")
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    UPDATE_SEQ_FIELD_NUMBER: _ClassVar[int]
    BASE_LEN_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    WINDOW_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    OPEN_FIELD_NUMBER: _ClassVar[int]
    sequence_id: int
    epoch: int
    update_seq: int
    base_len: int
    tokens: _containers.RepeatedScalarFieldContainer[int]
    window: int
    finished: bool
    open: SequenceOpen
    def __init__(self, sequence_id: _Optional[int] = ..., epoch: _Optional[int] = ..., update_seq: _Optional[int] = ..., base_len: _Optional[int] = ..., tokens: _Optional[_Iterable[int]] = ..., window: _Optional[int] = ..., finished: _Optional[bool] = ..., open: _Optional[_Union[SequenceOpen, _Mapping]] = ...) -> None: ...

class SequenceOpen(_message.Message):
    __slots__ = ("prompt_len", "max_len", "sampling", "partition", "verification", "min_tokens", "stop_token_ids", "traceparent")
    PROMPT_LEN_FIELD_NUMBER: _ClassVar[int]
    MAX_LEN_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    PARTITION_FIELD_NUMBER: _ClassVar[int]
    VERIFICATION_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    prompt_len: int
    max_len: int
    sampling: _sampling_pb2.SamplingParams
    partition: bytes
    verification: _sampling_pb2.SpeculationParams.Verification
    min_tokens: int
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    traceparent: str
    def __init__(self, prompt_len: _Optional[int] = ..., max_len: _Optional[int] = ..., sampling: _Optional[_Union[_sampling_pb2.SamplingParams, _Mapping]] = ..., partition: _Optional[bytes] = ..., verification: _Optional[_Union[_sampling_pb2.SpeculationParams.Verification, str]] = ..., min_tokens: _Optional[int] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., traceparent: _Optional[str] = ...) -> None: ...

class Proposal(_message.Message):
    __slots__ = ("sequence_id", "epoch", "update_seq", "seen_len", "start", "tokens", "logprobs", "sparse_probs", "held_us", "compute_us")
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    UPDATE_SEQ_FIELD_NUMBER: _ClassVar[int]
    SEEN_LEN_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    SPARSE_PROBS_FIELD_NUMBER: _ClassVar[int]
    HELD_US_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_US_FIELD_NUMBER: _ClassVar[int]
    sequence_id: int
    epoch: int
    update_seq: int
    seen_len: int
    start: int
    tokens: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedScalarFieldContainer[float]
    sparse_probs: _containers.RepeatedCompositeFieldContainer[SparseProbs]
    held_us: int
    compute_us: int
    def __init__(self, sequence_id: _Optional[int] = ..., epoch: _Optional[int] = ..., update_seq: _Optional[int] = ..., seen_len: _Optional[int] = ..., start: _Optional[int] = ..., tokens: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[float]] = ..., sparse_probs: _Optional[_Iterable[_Union[SparseProbs, _Mapping]]] = ..., held_us: _Optional[int] = ..., compute_us: _Optional[int] = ...) -> None: ...

class SparseProbs(_message.Message):
    __slots__ = ("ids", "probs")
    IDS_FIELD_NUMBER: _ClassVar[int]
    PROBS_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    probs: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, ids: _Optional[_Iterable[int]] = ..., probs: _Optional[_Iterable[float]] = ...) -> None: ...

class SequenceGone(_message.Message):
    __slots__ = ("sequence_id", "epoch", "reason")
    class Reason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        REASON_UNSPECIFIED: _ClassVar[SequenceGone.Reason]
        REASON_EVICTED: _ClassVar[SequenceGone.Reason]
        REASON_UNKNOWN: _ClassVar[SequenceGone.Reason]
        REASON_FULL: _ClassVar[SequenceGone.Reason]
        REASON_TOO_LONG: _ClassVar[SequenceGone.Reason]
    REASON_UNSPECIFIED: SequenceGone.Reason
    REASON_EVICTED: SequenceGone.Reason
    REASON_UNKNOWN: SequenceGone.Reason
    REASON_FULL: SequenceGone.Reason
    REASON_TOO_LONG: SequenceGone.Reason
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    sequence_id: int
    epoch: int
    reason: SequenceGone.Reason
    def __init__(self, sequence_id: _Optional[int] = ..., epoch: _Optional[int] = ..., reason: _Optional[_Union[SequenceGone.Reason, str]] = ...) -> None: ...

class DraftGetStatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DraftGetStatusResponse(_message.Message):
    __slots__ = ("model", "weights_fingerprint", "proposer", "load", "streams", "proposed_tokens", "pool", "instance_id", "compute_s", "state", "precision")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    PROPOSER_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    STREAMS_FIELD_NUMBER: _ClassVar[int]
    PROPOSED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    POOL_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_S_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    PRECISION_FIELD_NUMBER: _ClassVar[int]
    model: str
    weights_fingerprint: str
    proposer: str
    load: _target_pb2.DrafterLoad
    streams: int
    proposed_tokens: int
    pool: _target_pb2.BlockPoolStatus
    instance_id: str
    compute_s: float
    state: str
    precision: str
    def __init__(self, model: _Optional[str] = ..., weights_fingerprint: _Optional[str] = ..., proposer: _Optional[str] = ..., load: _Optional[_Union[_target_pb2.DrafterLoad, _Mapping]] = ..., streams: _Optional[int] = ..., proposed_tokens: _Optional[int] = ..., pool: _Optional[_Union[_target_pb2.BlockPoolStatus, _Mapping]] = ..., instance_id: _Optional[str] = ..., compute_s: _Optional[float] = ..., state: _Optional[str] = ..., precision: _Optional[str] = ...) -> None: ...
