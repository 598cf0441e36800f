"""The choices of the API, the default first. Roles stand in `names`."""

from __future__ import annotations

import enum


class DType(enum.StrEnum):
    """Number type of weights and activations."""

    AUTO = "Auto"
    BFLOAT16 = "BFloat16"
    FLOAT16 = "Float16"
    FLOAT32 = "Float32"


class KvDType(enum.StrEnum):
    """Number type of the KV cache."""

    AUTO = "Auto"
    BFLOAT16 = "BFloat16"
    FLOAT32 = "Float32"
    INT8 = "Int8"
    FP8 = "FP8"


class OnOversize(enum.StrEnum):
    """What becomes of a picture with more pixels than allowed."""

    DOWNSCALE = "Downscale"
    REJECT = "Reject"


class OnCorrupt(enum.StrEnum):
    """What becomes of a request with a picture that cannot be decoded."""

    REJECT = "Reject"
    SKIP = "Skip"


class ScalingMode(enum.StrEnum):
    """Who owns a pool's number of replicas: the autoscaler, somebody else, or this manifest."""

    AUTO = "Auto"
    EXTERNAL = "External"
    MANUAL = "Manual"


class OnDemand(enum.StrEnum):
    """What becomes of a picture while the encoder pool is at zero."""

    INLINE_AT_PREFILL = "InlineAtPrefill"
    QUEUE = "Queue"
    REJECT = "Reject"


class DisruptionPolicy(enum.StrEnum):
    """Whether a PodDisruptionBudget guards the pool."""

    AUTO = "Auto"
    NONE = "None"


class LendingMode(enum.StrEnum):
    """Which work of another role a pool takes over."""

    NONE = "None"
    INLINE_ENCODE = "InlineEncode"
    CHUNK_PREFILL = "ChunkPrefill"


class ServiceType(enum.StrEnum):
    """How the gateway is reached."""

    CLUSTER_IP = "ClusterIP"
    NODE_PORT = "NodePort"
    LOAD_BALANCER = "LoadBalancer"


class Modality(enum.StrEnum):
    """What a request carries beside text."""

    TEXT = "Text"
    IMAGE = "Image"
    VIDEO = "Video"


class AutoscalingPolicy(enum.StrEnum):
    """Whether decisions are applied, only shown, or not made."""

    ACTIVE = "Active"
    ADVISORY = "Advisory"
    OFF = "Off"


class MissingMetrics(enum.StrEnum):
    """What a pool does while too few of its pods answer."""

    HOLD = "Hold"
    FALLBACK = "Fallback"


class OnExceeded(enum.StrEnum):
    """What becomes of a request that would wait too long."""

    QUEUE = "Queue"
    REJECT = "Reject"


class TransferMode(enum.StrEnum):
    """How bytes go from one pod to the next."""

    AUTO = "Auto"
    STREAM = "Stream"
    SHARED_MEMORY = "SharedMemory"
    RDMA = "RDMA"


class RolloutStrategy(enum.StrEnum):
    """How pods get from one revision to the next."""

    ROLLING_BY_REVISION = "RollingByRevision"
    RECREATE = "Recreate"


class OnFailure(enum.StrEnum):
    """What becomes of a rollout that does not progress."""

    PAUSE = "Pause"
    ROLLBACK = "Rollback"


class NoSpareCapacity(enum.StrEnum):
    """What a rollout does where no node has room for one more pod."""

    DRAIN_FIRST = "DrainFirst"
    WAIT = "Wait"


class Topology(enum.StrEnum):
    """Which pools a service has, spelt out."""

    ENCODER_PREFILL_DECODE = "EncoderPrefillDecode"
    ENCODER_DECODE = "EncoderDecode"
    PREFILL_DECODE = "PrefillDecode"
    DECODE = "Decode"
