from protos.outrider.v1 import sampling_pb2 as _sampling_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class TokenRequest(_message.Message):
    __slots__ = ("request_id", "token_ids", "resumed_token_ids", "sampling", "stopping", "speculation", "logprobs", "prompt_logprobs", "n", "priority", "cache_salt")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    RESUMED_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    STOPPING_FIELD_NUMBER: _ClassVar[int]
    SPECULATION_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    N_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    resumed_token_ids: _containers.RepeatedScalarFieldContainer[int]
    sampling: _sampling_pb2.SamplingParams
    stopping: _sampling_pb2.StoppingParams
    speculation: _sampling_pb2.SpeculationParams
    logprobs: int
    prompt_logprobs: int
    n: int
    priority: int
    cache_salt: bytes
    def __init__(self, request_id: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., resumed_token_ids: _Optional[_Iterable[int]] = ..., sampling: _Optional[_Union[_sampling_pb2.SamplingParams, _Mapping]] = ..., stopping: _Optional[_Union[_sampling_pb2.StoppingParams, _Mapping]] = ..., speculation: _Optional[_Union[_sampling_pb2.SpeculationParams, _Mapping]] = ..., logprobs: _Optional[int] = ..., prompt_logprobs: _Optional[int] = ..., n: _Optional[int] = ..., priority: _Optional[int] = ..., cache_salt: _Optional[bytes] = ...) -> None: ...

class TokenChunk(_message.Message):
    __slots__ = ("index", "first_index", "tokens", "finish", "speculation", "prompt_tokens", "seed", "cached_prompt_tokens")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    FIRST_INDEX_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    FINISH_FIELD_NUMBER: _ClassVar[int]
    SPECULATION_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    CACHED_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    index: int
    first_index: int
    tokens: _containers.RepeatedCompositeFieldContainer[_sampling_pb2.GeneratedToken]
    finish: TokenFinish
    speculation: _sampling_pb2.SpeculationStats
    prompt_tokens: _containers.RepeatedCompositeFieldContainer[_sampling_pb2.PromptToken]
    seed: int
    cached_prompt_tokens: int
    def __init__(self, index: _Optional[int] = ..., first_index: _Optional[int] = ..., tokens: _Optional[_Iterable[_Union[_sampling_pb2.GeneratedToken, _Mapping]]] = ..., finish: _Optional[_Union[TokenFinish, _Mapping]] = ..., speculation: _Optional[_Union[_sampling_pb2.SpeculationStats, _Mapping]] = ..., prompt_tokens: _Optional[_Iterable[_Union[_sampling_pb2.PromptToken, _Mapping]]] = ..., seed: _Optional[int] = ..., cached_prompt_tokens: _Optional[int] = ...) -> None: ...

class TokenFinish(_message.Message):
    __slots__ = ("reason", "usage", "speculation")
    REASON_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    SPECULATION_FIELD_NUMBER: _ClassVar[int]
    reason: _sampling_pb2.FinishReason
    usage: _sampling_pb2.Usage
    speculation: _sampling_pb2.SpeculationStats
    def __init__(self, reason: _Optional[_Union[_sampling_pb2.FinishReason, str]] = ..., usage: _Optional[_Union[_sampling_pb2.Usage, _Mapping]] = ..., speculation: _Optional[_Union[_sampling_pb2.SpeculationStats, _Mapping]] = ...) -> None: ...

class TargetGetStatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class TargetGetStatusResponse(_message.Message):
    __slots__ = ("model", "token_table_hash", "weights_fingerprint", "numerics_id", "vocab_size", "max_model_len", "max_draft_tokens", "state", "load", "pool", "drafters", "speculation", "instance_id", "eos_token_ids", "max_waiting", "precision")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TOKEN_TABLE_HASH_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    NUMERICS_ID_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    MAX_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    POOL_FIELD_NUMBER: _ClassVar[int]
    DRAFTERS_FIELD_NUMBER: _ClassVar[int]
    SPECULATION_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    MAX_WAITING_FIELD_NUMBER: _ClassVar[int]
    PRECISION_FIELD_NUMBER: _ClassVar[int]
    model: str
    token_table_hash: bytes
    weights_fingerprint: str
    numerics_id: str
    vocab_size: int
    max_model_len: int
    max_draft_tokens: int
    state: str
    load: TargetLoad
    pool: BlockPoolStatus
    drafters: _containers.RepeatedCompositeFieldContainer[DrafterStatus]
    speculation: SpeculationTotals
    instance_id: str
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    max_waiting: int
    precision: str
    def __init__(self, model: _Optional[str] = ..., token_table_hash: _Optional[bytes] = ..., weights_fingerprint: _Optional[str] = ..., numerics_id: _Optional[str] = ..., vocab_size: _Optional[int] = ..., max_model_len: _Optional[int] = ..., max_draft_tokens: _Optional[int] = ..., state: _Optional[str] = ..., load: _Optional[_Union[TargetLoad, _Mapping]] = ..., pool: _Optional[_Union[BlockPoolStatus, _Mapping]] = ..., drafters: _Optional[_Iterable[_Union[DrafterStatus, _Mapping]]] = ..., speculation: _Optional[_Union[SpeculationTotals, _Mapping]] = ..., instance_id: _Optional[str] = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., max_waiting: _Optional[int] = ..., precision: _Optional[str] = ...) -> None: ...

class TargetLoad(_message.Message):
    __slots__ = ("running", "waiting", "started", "finished", "failed", "cancelled", "refused", "steps", "generated_tokens", "preemptions", "last_step_s", "prefilled_tokens")
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    STARTED_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    CANCELLED_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    GENERATED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    LAST_STEP_S_FIELD_NUMBER: _ClassVar[int]
    PREFILLED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    running: int
    waiting: int
    started: int
    finished: int
    failed: int
    cancelled: int
    refused: int
    steps: int
    generated_tokens: int
    preemptions: int
    last_step_s: float
    prefilled_tokens: int
    def __init__(self, running: _Optional[int] = ..., waiting: _Optional[int] = ..., started: _Optional[int] = ..., finished: _Optional[int] = ..., failed: _Optional[int] = ..., cancelled: _Optional[int] = ..., refused: _Optional[int] = ..., steps: _Optional[int] = ..., generated_tokens: _Optional[int] = ..., preemptions: _Optional[int] = ..., last_step_s: _Optional[float] = ..., prefilled_tokens: _Optional[int] = ...) -> None: ...

class BlockPoolStatus(_message.Message):
    __slots__ = ("total", "free", "used", "block_size", "integrity_errors", "wasted_slots", "kv_dtype", "block_bytes")
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    FREE_FIELD_NUMBER: _ClassVar[int]
    USED_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    INTEGRITY_ERRORS_FIELD_NUMBER: _ClassVar[int]
    WASTED_SLOTS_FIELD_NUMBER: _ClassVar[int]
    KV_DTYPE_FIELD_NUMBER: _ClassVar[int]
    BLOCK_BYTES_FIELD_NUMBER: _ClassVar[int]
    total: int
    free: int
    used: int
    block_size: int
    integrity_errors: _containers.RepeatedScalarFieldContainer[str]
    wasted_slots: int
    kv_dtype: str
    block_bytes: int
    def __init__(self, total: _Optional[int] = ..., free: _Optional[int] = ..., used: _Optional[int] = ..., block_size: _Optional[int] = ..., integrity_errors: _Optional[_Iterable[str]] = ..., wasted_slots: _Optional[int] = ..., kv_dtype: _Optional[str] = ..., block_bytes: _Optional[int] = ...) -> None: ...

class DrafterStatus(_message.Message):
    __slots__ = ("address", "state", "reason", "instance_id", "sequences", "connect_attempts", "round_trip_s", "weights_fingerprint", "load")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    CONNECT_ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    ROUND_TRIP_S_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    address: str
    state: str
    reason: str
    instance_id: str
    sequences: int
    connect_attempts: int
    round_trip_s: float
    weights_fingerprint: str
    load: DrafterLoad
    def __init__(self, address: _Optional[str] = ..., state: _Optional[str] = ..., reason: _Optional[str] = ..., instance_id: _Optional[str] = ..., sequences: _Optional[int] = ..., connect_attempts: _Optional[int] = ..., round_trip_s: _Optional[float] = ..., weights_fingerprint: _Optional[str] = ..., load: _Optional[_Union[DrafterLoad, _Mapping]] = ...) -> None: ...

class DrafterLoad(_message.Message):
    __slots__ = ("sessions", "queue", "step_us", "capacity")
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    STEP_US_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_FIELD_NUMBER: _ClassVar[int]
    sessions: int
    queue: int
    step_us: int
    capacity: int
    def __init__(self, sessions: _Optional[int] = ..., queue: _Optional[int] = ..., step_us: _Optional[int] = ..., capacity: _Optional[int] = ...) -> None: ...

class SpeculationTotals(_message.Message):
    __slots__ = ("rounds", "proposed", "drafted", "accepted", "accepted_per_position", "unused", "frames", "wait_s")
    class UnusedEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class FramesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    ROUNDS_FIELD_NUMBER: _ClassVar[int]
    PROPOSED_FIELD_NUMBER: _ClassVar[int]
    DRAFTED_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_PER_POSITION_FIELD_NUMBER: _ClassVar[int]
    UNUSED_FIELD_NUMBER: _ClassVar[int]
    FRAMES_FIELD_NUMBER: _ClassVar[int]
    WAIT_S_FIELD_NUMBER: _ClassVar[int]
    rounds: int
    proposed: int
    drafted: int
    accepted: int
    accepted_per_position: _containers.RepeatedScalarFieldContainer[int]
    unused: _containers.ScalarMap[str, int]
    frames: _containers.ScalarMap[str, int]
    wait_s: float
    def __init__(self, rounds: _Optional[int] = ..., proposed: _Optional[int] = ..., drafted: _Optional[int] = ..., accepted: _Optional[int] = ..., accepted_per_position: _Optional[_Iterable[int]] = ..., unused: _Optional[_Mapping[str, int]] = ..., frames: _Optional[_Mapping[str, int]] = ..., wait_s: _Optional[float] = ...) -> None: ...
