from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class CancelOutcome(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    CANCEL_OUTCOME_UNSPECIFIED: _ClassVar[CancelOutcome]
    NOT_FOUND: _ClassVar[CancelOutcome]
    ALREADY_COMPLETE: _ClassVar[CancelOutcome]
    CANCELLED_BEFORE_ADVERTISED: _ClassVar[CancelOutcome]
    CANCEL_REQUESTED_IN_FLIGHT: _ClassVar[CancelOutcome]
CANCEL_OUTCOME_UNSPECIFIED: CancelOutcome
NOT_FOUND: CancelOutcome
ALREADY_COMPLETE: CancelOutcome
CANCELLED_BEFORE_ADVERTISED: CancelOutcome
CANCEL_REQUESTED_IN_FLIGHT: CancelOutcome

class Frame(_message.Message):
    __slots__ = ("raw",)
    RAW_FIELD_NUMBER: _ClassVar[int]
    raw: bytes
    def __init__(self, raw: _Optional[bytes] = ...) -> None: ...

class HelloRequest(_message.Message):
    __slots__ = ("protocol_version",)
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    def __init__(self, protocol_version: _Optional[int] = ...) -> None: ...

class HelloReply(_message.Message):
    __slots__ = ("protocol_version", "role", "stages", "model", "model_revision", "pod_name", "pod_uid", "boot_id", "layout_fingerprint", "embed_fingerprint", "compat", "limits", "weights", "grammars", "min_tokens", "prompt_logprobs", "embed_layout")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    STAGES_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    MODEL_REVISION_FIELD_NUMBER: _ClassVar[int]
    POD_NAME_FIELD_NUMBER: _ClassVar[int]
    POD_UID_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    EMBED_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    COMPAT_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    GRAMMARS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    EMBED_LAYOUT_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    role: str
    stages: _containers.RepeatedScalarFieldContainer[str]
    model: str
    model_revision: str
    pod_name: str
    pod_uid: str
    boot_id: bytes
    layout_fingerprint: bytes
    embed_fingerprint: bytes
    compat: str
    limits: Limits
    weights: str
    grammars: bool
    min_tokens: bool
    prompt_logprobs: bool
    embed_layout: EmbedLayout
    def __init__(self, protocol_version: _Optional[int] = ..., role: _Optional[str] = ..., stages: _Optional[_Iterable[str]] = ..., model: _Optional[str] = ..., model_revision: _Optional[str] = ..., pod_name: _Optional[str] = ..., pod_uid: _Optional[str] = ..., boot_id: _Optional[bytes] = ..., layout_fingerprint: _Optional[bytes] = ..., embed_fingerprint: _Optional[bytes] = ..., compat: _Optional[str] = ..., limits: _Optional[_Union[Limits, _Mapping]] = ..., weights: _Optional[str] = ..., grammars: _Optional[bool] = ..., min_tokens: _Optional[bool] = ..., prompt_logprobs: _Optional[bool] = ..., embed_layout: _Optional[_Union[EmbedLayout, _Mapping]] = ...) -> None: ...

class EmbedLayout(_message.Message):
    __slots__ = ("model_revision", "hidden_size", "num_levels", "dtype")
    MODEL_REVISION_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_SIZE_FIELD_NUMBER: _ClassVar[int]
    NUM_LEVELS_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    model_revision: str
    hidden_size: int
    num_levels: int
    dtype: str
    def __init__(self, model_revision: _Optional[str] = ..., hidden_size: _Optional[int] = ..., num_levels: _Optional[int] = ..., dtype: _Optional[str] = ...) -> None: ...

class Limits(_message.Message):
    __slots__ = ("block_size_tokens", "kv_capacity_tokens", "max_model_len_tokens", "max_requests")
    BLOCK_SIZE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    KV_CAPACITY_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    block_size_tokens: int
    kv_capacity_tokens: int
    max_model_len_tokens: int
    max_requests: int
    def __init__(self, block_size_tokens: _Optional[int] = ..., kv_capacity_tokens: _Optional[int] = ..., max_model_len_tokens: _Optional[int] = ..., max_requests: _Optional[int] = ...) -> None: ...

class WatchLoadRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class LoadReply(_message.Message):
    __slots__ = ("num_inflight", "num_waiting", "work_queued_seconds", "kv_free_tokens", "kv_capacity_tokens", "accepting", "boot_id", "max_lent", "num_lent", "num_images", "lent_queued_seconds")
    NUM_INFLIGHT_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_FIELD_NUMBER: _ClassVar[int]
    WORK_QUEUED_SECONDS_FIELD_NUMBER: _ClassVar[int]
    KV_FREE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    KV_CAPACITY_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTING_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    MAX_LENT_FIELD_NUMBER: _ClassVar[int]
    NUM_LENT_FIELD_NUMBER: _ClassVar[int]
    NUM_IMAGES_FIELD_NUMBER: _ClassVar[int]
    LENT_QUEUED_SECONDS_FIELD_NUMBER: _ClassVar[int]
    num_inflight: int
    num_waiting: int
    work_queued_seconds: float
    kv_free_tokens: int
    kv_capacity_tokens: int
    accepting: bool
    boot_id: bytes
    max_lent: int
    num_lent: int
    num_images: int
    lent_queued_seconds: float
    def __init__(self, num_inflight: _Optional[int] = ..., num_waiting: _Optional[int] = ..., work_queued_seconds: _Optional[float] = ..., kv_free_tokens: _Optional[int] = ..., kv_capacity_tokens: _Optional[int] = ..., accepting: _Optional[bool] = ..., boot_id: _Optional[bytes] = ..., max_lent: _Optional[int] = ..., num_lent: _Optional[int] = ..., num_images: _Optional[int] = ..., lent_queued_seconds: _Optional[float] = ...) -> None: ...

class CancelRequest(_message.Message):
    __slots__ = ("request_id", "attempt")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ...) -> None: ...

class CancelReply(_message.Message):
    __slots__ = ("outcome",)
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    outcome: CancelOutcome
    def __init__(self, outcome: _Optional[_Union[CancelOutcome, str]] = ...) -> None: ...

class RenewLeasesRequest(_message.Message):
    __slots__ = ("transfer_ids", "boot_id")
    TRANSFER_IDS_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    transfer_ids: _containers.RepeatedScalarFieldContainer[str]
    boot_id: bytes
    def __init__(self, transfer_ids: _Optional[_Iterable[str]] = ..., boot_id: _Optional[bytes] = ...) -> None: ...

class RenewLeasesReply(_message.Message):
    __slots__ = ("gone",)
    GONE_FIELD_NUMBER: _ClassVar[int]
    gone: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, gone: _Optional[_Iterable[str]] = ...) -> None: ...

class ReleaseLeaseRequest(_message.Message):
    __slots__ = ("transfer_id", "boot_id")
    TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    transfer_id: str
    boot_id: bytes
    def __init__(self, transfer_id: _Optional[str] = ..., boot_id: _Optional[bytes] = ...) -> None: ...

class ReleaseLeaseReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Source(_message.Message):
    __slots__ = ("address", "boot_id", "transfer_id", "fingerprint")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    address: str
    boot_id: bytes
    transfer_id: str
    fingerprint: bytes
    def __init__(self, address: _Optional[str] = ..., boot_id: _Optional[bytes] = ..., transfer_id: _Optional[str] = ..., fingerprint: _Optional[bytes] = ...) -> None: ...

class FetchRequest(_message.Message):
    __slots__ = ("transfer_id", "boot_id", "fingerprint", "request_id", "attempt", "first_unit", "transport", "invitation")
    TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    FIRST_UNIT_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    INVITATION_FIELD_NUMBER: _ClassVar[int]
    transfer_id: str
    boot_id: bytes
    fingerprint: bytes
    request_id: str
    attempt: int
    first_unit: int
    transport: str
    invitation: bytes
    def __init__(self, transfer_id: _Optional[str] = ..., boot_id: _Optional[bytes] = ..., fingerprint: _Optional[bytes] = ..., request_id: _Optional[str] = ..., attempt: _Optional[int] = ..., first_unit: _Optional[int] = ..., transport: _Optional[str] = ..., invitation: _Optional[bytes] = ...) -> None: ...

class DataRequest(_message.Message):
    __slots__ = ("embedding", "kv")
    EMBEDDING_FIELD_NUMBER: _ClassVar[int]
    KV_FIELD_NUMBER: _ClassVar[int]
    embedding: FetchRequest
    kv: FetchRequest
    def __init__(self, embedding: _Optional[_Union[FetchRequest, _Mapping]] = ..., kv: _Optional[_Union[FetchRequest, _Mapping]] = ...) -> None: ...

class DataFailure(_message.Message):
    __slots__ = ("code", "message", "metadata")
    class MetadataEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: bytes
        def __init__(self, key: _Optional[str] = ..., value: _Optional[bytes] = ...) -> None: ...
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    METADATA_FIELD_NUMBER: _ClassVar[int]
    code: int
    message: str
    metadata: _containers.ScalarMap[str, bytes]
    def __init__(self, code: _Optional[int] = ..., message: _Optional[str] = ..., metadata: _Optional[_Mapping[str, bytes]] = ...) -> None: ...

class StageSpan(_message.Message):
    __slots__ = ("stage", "start_us", "end_us", "item")
    STAGE_FIELD_NUMBER: _ClassVar[int]
    START_US_FIELD_NUMBER: _ClassVar[int]
    END_US_FIELD_NUMBER: _ClassVar[int]
    ITEM_FIELD_NUMBER: _ClassVar[int]
    stage: str
    start_us: int
    end_us: int
    item: int
    def __init__(self, stage: _Optional[str] = ..., start_us: _Optional[int] = ..., end_us: _Optional[int] = ..., item: _Optional[int] = ...) -> None: ...

class EncodeRequest(_message.Message):
    __slots__ = ("begin", "chunk")
    BEGIN_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    begin: EncodeBegin
    chunk: EncodeChunk
    def __init__(self, begin: _Optional[_Union[EncodeBegin, _Mapping]] = ..., chunk: _Optional[_Union[EncodeChunk, _Mapping]] = ...) -> None: ...

class EncodeBegin(_message.Message):
    __slots__ = ("request_id", "attempt", "items", "cache_salt", "last_resort", "on_corrupt", "priority", "pins_session", "weighted_seconds")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    LAST_RESORT_FIELD_NUMBER: _ClassVar[int]
    ON_CORRUPT_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    PINS_SESSION_FIELD_NUMBER: _ClassVar[int]
    WEIGHTED_SECONDS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    items: _containers.RepeatedCompositeFieldContainer[EncodeItem]
    cache_salt: bytes
    last_resort: bool
    on_corrupt: str
    priority: int
    pins_session: bool
    weighted_seconds: float
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ..., items: _Optional[_Iterable[_Union[EncodeItem, _Mapping]]] = ..., cache_salt: _Optional[bytes] = ..., last_resort: _Optional[bool] = ..., on_corrupt: _Optional[str] = ..., priority: _Optional[int] = ..., pins_session: _Optional[bool] = ..., weighted_seconds: _Optional[float] = ...) -> None: ...

class EncodeItem(_message.Message):
    __slots__ = ("transfer_id", "num_bytes", "width", "height", "num_tokens", "max_pixels", "format", "reduction", "grid_thw")
    TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    WIDTH_FIELD_NUMBER: _ClassVar[int]
    HEIGHT_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_PIXELS_FIELD_NUMBER: _ClassVar[int]
    FORMAT_FIELD_NUMBER: _ClassVar[int]
    REDUCTION_FIELD_NUMBER: _ClassVar[int]
    GRID_THW_FIELD_NUMBER: _ClassVar[int]
    transfer_id: str
    num_bytes: int
    width: int
    height: int
    num_tokens: int
    max_pixels: int
    format: str
    reduction: Reduction
    grid_thw: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, transfer_id: _Optional[str] = ..., num_bytes: _Optional[int] = ..., width: _Optional[int] = ..., height: _Optional[int] = ..., num_tokens: _Optional[int] = ..., max_pixels: _Optional[int] = ..., format: _Optional[str] = ..., reduction: _Optional[_Union[Reduction, _Mapping]] = ..., grid_thw: _Optional[_Iterable[int]] = ...) -> None: ...

class Reduction(_message.Message):
    __slots__ = ("method", "keep_permille")
    METHOD_FIELD_NUMBER: _ClassVar[int]
    KEEP_PERMILLE_FIELD_NUMBER: _ClassVar[int]
    method: str
    keep_permille: int
    def __init__(self, method: _Optional[str] = ..., keep_permille: _Optional[int] = ...) -> None: ...

class EncodeChunk(_message.Message):
    __slots__ = ("item", "data")
    ITEM_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    item: int
    data: bytes
    def __init__(self, item: _Optional[int] = ..., data: _Optional[bytes] = ...) -> None: ...

class EncodeReply(_message.Message):
    __slots__ = ("decoded", "ready", "failed", "spans", "clock_us")
    DECODED_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    SPANS_FIELD_NUMBER: _ClassVar[int]
    CLOCK_US_FIELD_NUMBER: _ClassVar[int]
    decoded: Decoded
    ready: ItemReady
    failed: ItemFailed
    spans: _containers.RepeatedCompositeFieldContainer[StageSpan]
    clock_us: int
    def __init__(self, decoded: _Optional[_Union[Decoded, _Mapping]] = ..., ready: _Optional[_Union[ItemReady, _Mapping]] = ..., failed: _Optional[_Union[ItemFailed, _Mapping]] = ..., spans: _Optional[_Iterable[_Union[StageSpan, _Mapping]]] = ..., clock_us: _Optional[int] = ...) -> None: ...

class Decoded(_message.Message):
    __slots__ = ("items",)
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    items: _containers.RepeatedCompositeFieldContainer[DecodedItem]
    def __init__(self, items: _Optional[_Iterable[_Union[DecodedItem, _Mapping]]] = ...) -> None: ...

class DecodedItem(_message.Message):
    __slots__ = ("num_tokens", "grid_thw", "image_key", "error")
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    GRID_THW_FIELD_NUMBER: _ClassVar[int]
    IMAGE_KEY_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    num_tokens: int
    grid_thw: _containers.RepeatedScalarFieldContainer[int]
    image_key: bytes
    error: ItemError
    def __init__(self, num_tokens: _Optional[int] = ..., grid_thw: _Optional[_Iterable[int]] = ..., image_key: _Optional[bytes] = ..., error: _Optional[_Union[ItemError, _Mapping]] = ...) -> None: ...

class ItemError(_message.Message):
    __slots__ = ("code", "message")
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    code: str
    message: str
    def __init__(self, code: _Optional[str] = ..., message: _Optional[str] = ...) -> None: ...

class ItemReady(_message.Message):
    __slots__ = ("item", "cache_hit", "num_bytes")
    ITEM_FIELD_NUMBER: _ClassVar[int]
    CACHE_HIT_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    item: int
    cache_hit: bool
    num_bytes: int
    def __init__(self, item: _Optional[int] = ..., cache_hit: _Optional[bool] = ..., num_bytes: _Optional[int] = ...) -> None: ...

class ItemFailed(_message.Message):
    __slots__ = ("item", "error")
    ITEM_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    item: int
    error: ItemError
    def __init__(self, item: _Optional[int] = ..., error: _Optional[_Union[ItemError, _Mapping]] = ...) -> None: ...

class ImageItem(_message.Message):
    __slots__ = ("image_key", "offset", "num_tokens", "grid_thw", "source", "reduction")
    IMAGE_KEY_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    GRID_THW_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    REDUCTION_FIELD_NUMBER: _ClassVar[int]
    image_key: bytes
    offset: int
    num_tokens: int
    grid_thw: _containers.RepeatedScalarFieldContainer[int]
    source: Source
    reduction: Reduction
    def __init__(self, image_key: _Optional[bytes] = ..., offset: _Optional[int] = ..., num_tokens: _Optional[int] = ..., grid_thw: _Optional[_Iterable[int]] = ..., source: _Optional[_Union[Source, _Mapping]] = ..., reduction: _Optional[_Union[Reduction, _Mapping]] = ...) -> None: ...

class Sampling(_message.Message):
    __slots__ = ("temperature", "top_p", "top_k", "seed", "max_tokens", "stop_token_ids", "ignore_eos", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty", "logit_bias", "num_logprobs", "grammar", "min_tokens", "num_prompt_logprobs")
    class LogitBiasEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: float
        def __init__(self, key: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    NUM_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_p: float
    top_k: int
    seed: int
    max_tokens: int
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    ignore_eos: bool
    min_p: float
    frequency_penalty: float
    presence_penalty: float
    repetition_penalty: float
    logit_bias: _containers.ScalarMap[int, float]
    num_logprobs: int
    grammar: bytes
    min_tokens: int
    num_prompt_logprobs: int
    def __init__(self, temperature: _Optional[float] = ..., top_p: _Optional[float] = ..., top_k: _Optional[int] = ..., seed: _Optional[int] = ..., max_tokens: _Optional[int] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., ignore_eos: _Optional[bool] = ..., min_p: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., logit_bias: _Optional[_Mapping[int, float]] = ..., num_logprobs: _Optional[int] = ..., grammar: _Optional[bytes] = ..., min_tokens: _Optional[int] = ..., num_prompt_logprobs: _Optional[int] = ...) -> None: ...

class TokenLogprobs(_message.Message):
    __slots__ = ("logprob", "top_token_ids", "top_logprobs")
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    TOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    logprob: float
    top_token_ids: _containers.RepeatedScalarFieldContainer[int]
    top_logprobs: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, logprob: _Optional[float] = ..., top_token_ids: _Optional[_Iterable[int]] = ..., top_logprobs: _Optional[_Iterable[float]] = ...) -> None: ...

class PromptLogprobs(_message.Message):
    __slots__ = ("first_index", "logprobs", "ranks")
    FIRST_INDEX_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    first_index: int
    logprobs: _containers.RepeatedCompositeFieldContainer[TokenLogprobs]
    ranks: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, first_index: _Optional[int] = ..., logprobs: _Optional[_Iterable[_Union[TokenLogprobs, _Mapping]]] = ..., ranks: _Optional[_Iterable[int]] = ...) -> None: ...

class PrefillRequest(_message.Message):
    __slots__ = ("request_id", "attempt", "transfer_id", "token_ids", "num_prompt_tokens", "items", "sampling", "cache_salt", "last_resort", "handoff", "priority", "num_history_tokens", "weighted_seconds")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    LAST_RESORT_FIELD_NUMBER: _ClassVar[int]
    HANDOFF_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    NUM_HISTORY_TOKENS_FIELD_NUMBER: _ClassVar[int]
    WEIGHTED_SECONDS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    transfer_id: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    num_prompt_tokens: int
    items: _containers.RepeatedCompositeFieldContainer[ImageItem]
    sampling: Sampling
    cache_salt: bytes
    last_resort: bool
    handoff: bool
    priority: int
    num_history_tokens: int
    weighted_seconds: float
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ..., transfer_id: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., num_prompt_tokens: _Optional[int] = ..., items: _Optional[_Iterable[_Union[ImageItem, _Mapping]]] = ..., sampling: _Optional[_Union[Sampling, _Mapping]] = ..., cache_salt: _Optional[bytes] = ..., last_resort: _Optional[bool] = ..., handoff: _Optional[bool] = ..., priority: _Optional[int] = ..., num_history_tokens: _Optional[int] = ..., weighted_seconds: _Optional[float] = ...) -> None: ...

class PrefetchRequest(_message.Message):
    __slots__ = ("request_id", "attempt", "token_ids", "num_prompt_tokens", "items", "sampling", "cache_salt", "priority", "num_history_tokens", "weighted_seconds")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    NUM_HISTORY_TOKENS_FIELD_NUMBER: _ClassVar[int]
    WEIGHTED_SECONDS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    num_prompt_tokens: int
    items: _containers.RepeatedCompositeFieldContainer[ImageItem]
    sampling: Sampling
    cache_salt: bytes
    priority: int
    num_history_tokens: int
    weighted_seconds: float
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., num_prompt_tokens: _Optional[int] = ..., items: _Optional[_Iterable[_Union[ImageItem, _Mapping]]] = ..., sampling: _Optional[_Union[Sampling, _Mapping]] = ..., cache_salt: _Optional[bytes] = ..., priority: _Optional[int] = ..., num_history_tokens: _Optional[int] = ..., weighted_seconds: _Optional[float] = ...) -> None: ...

class PrefetchReply(_message.Message):
    __slots__ = ("outcome", "num_cached_tokens", "num_computed_tokens")
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_COMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    outcome: str
    num_cached_tokens: int
    num_computed_tokens: int
    def __init__(self, outcome: _Optional[str] = ..., num_cached_tokens: _Optional[int] = ..., num_computed_tokens: _Optional[int] = ...) -> None: ...

class PrefillReply(_message.Message):
    __slots__ = ("accepted", "first_token", "done", "prompt_logprobs", "spans", "clock_us")
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    SPANS_FIELD_NUMBER: _ClassVar[int]
    CLOCK_US_FIELD_NUMBER: _ClassVar[int]
    accepted: PrefillAccepted
    first_token: FirstToken
    done: PrefillDone
    prompt_logprobs: PromptLogprobs
    spans: _containers.RepeatedCompositeFieldContainer[StageSpan]
    clock_us: int
    def __init__(self, accepted: _Optional[_Union[PrefillAccepted, _Mapping]] = ..., first_token: _Optional[_Union[FirstToken, _Mapping]] = ..., done: _Optional[_Union[PrefillDone, _Mapping]] = ..., prompt_logprobs: _Optional[_Union[PromptLogprobs, _Mapping]] = ..., spans: _Optional[_Iterable[_Union[StageSpan, _Mapping]]] = ..., clock_us: _Optional[int] = ...) -> None: ...

class PrefillAccepted(_message.Message):
    __slots__ = ("transfer_id", "boot_id", "layout_fingerprint", "lease_milliseconds")
    TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    LEASE_MILLISECONDS_FIELD_NUMBER: _ClassVar[int]
    transfer_id: str
    boot_id: bytes
    layout_fingerprint: bytes
    lease_milliseconds: int
    def __init__(self, transfer_id: _Optional[str] = ..., boot_id: _Optional[bytes] = ..., layout_fingerprint: _Optional[bytes] = ..., lease_milliseconds: _Optional[int] = ...) -> None: ...

class FirstToken(_message.Message):
    __slots__ = ("index", "token_id", "num_cached_tokens", "finish_reason", "logprobs")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    index: int
    token_id: int
    num_cached_tokens: int
    finish_reason: str
    logprobs: TokenLogprobs
    def __init__(self, index: _Optional[int] = ..., token_id: _Optional[int] = ..., num_cached_tokens: _Optional[int] = ..., finish_reason: _Optional[str] = ..., logprobs: _Optional[_Union[TokenLogprobs, _Mapping]] = ...) -> None: ...

class PrefillDone(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ReserveRequest(_message.Message):
    __slots__ = ("request_id", "attempt", "num_tokens", "last_resort")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LAST_RESORT_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    num_tokens: int
    last_resort: bool
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ..., num_tokens: _Optional[int] = ..., last_resort: _Optional[bool] = ...) -> None: ...

class ReserveReply(_message.Message):
    __slots__ = ("reservation_id", "boot_id", "lease_milliseconds")
    RESERVATION_ID_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    LEASE_MILLISECONDS_FIELD_NUMBER: _ClassVar[int]
    reservation_id: str
    boot_id: bytes
    lease_milliseconds: int
    def __init__(self, reservation_id: _Optional[str] = ..., boot_id: _Optional[bytes] = ..., lease_milliseconds: _Optional[int] = ...) -> None: ...

class DecodeRequest(_message.Message):
    __slots__ = ("request_id", "attempt", "reservation_id", "token_ids", "num_prompt_tokens", "items", "sampling", "cache_salt", "kv", "boot_id", "priority", "num_history_tokens", "weighted_seconds")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    RESERVATION_ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    KV_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    NUM_HISTORY_TOKENS_FIELD_NUMBER: _ClassVar[int]
    WEIGHTED_SECONDS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    reservation_id: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    num_prompt_tokens: int
    items: _containers.RepeatedCompositeFieldContainer[ImageItem]
    sampling: Sampling
    cache_salt: bytes
    kv: Source
    boot_id: bytes
    priority: int
    num_history_tokens: int
    weighted_seconds: float
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ..., reservation_id: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., num_prompt_tokens: _Optional[int] = ..., items: _Optional[_Iterable[_Union[ImageItem, _Mapping]]] = ..., sampling: _Optional[_Union[Sampling, _Mapping]] = ..., cache_salt: _Optional[bytes] = ..., kv: _Optional[_Union[Source, _Mapping]] = ..., boot_id: _Optional[bytes] = ..., priority: _Optional[int] = ..., num_history_tokens: _Optional[int] = ..., weighted_seconds: _Optional[float] = ...) -> None: ...

class DecodeReply(_message.Message):
    __slots__ = ("tokens", "finished", "spans", "clock_us")
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    SPANS_FIELD_NUMBER: _ClassVar[int]
    CLOCK_US_FIELD_NUMBER: _ClassVar[int]
    tokens: Tokens
    finished: Finished
    spans: _containers.RepeatedCompositeFieldContainer[StageSpan]
    clock_us: int
    def __init__(self, tokens: _Optional[_Union[Tokens, _Mapping]] = ..., finished: _Optional[_Union[Finished, _Mapping]] = ..., spans: _Optional[_Iterable[_Union[StageSpan, _Mapping]]] = ..., clock_us: _Optional[int] = ...) -> None: ...

class Tokens(_message.Message):
    __slots__ = ("first_index", "token_ids", "logprobs")
    FIRST_INDEX_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    first_index: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedCompositeFieldContainer[TokenLogprobs]
    def __init__(self, first_index: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[_Union[TokenLogprobs, _Mapping]]] = ...) -> None: ...

class Finished(_message.Message):
    __slots__ = ("finish_reason", "num_tokens")
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    finish_reason: str
    num_tokens: int
    def __init__(self, finish_reason: _Optional[str] = ..., num_tokens: _Optional[int] = ...) -> None: ...
