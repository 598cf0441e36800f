"""The enums of the API, the default first. Roles are in `names`."""

from __future__ import annotations

import enum


class DType(enum.StrEnum):
    """Number type of weights and activations."""

    AUTO = "Auto"
    BFLOAT16 = "BFloat16"
    FLOAT16 = "Float16"
    FLOAT32 = "Float32"


class KvDType(enum.StrEnum):
    """Number type of the KV cache; the last three are of one modality."""

    AUTO = "Auto"
    BFLOAT16 = "BFloat16"
    FLOAT32 = "Float32"
    INT8 = "Int8"
    FP8 = "FP8"
    VISION_INT8 = "VisionInt8"
    TEXT_INT8 = "TextInt8"
    VISION_KIVI4 = "VisionKivi4"

    @property
    def flag(self) -> str:
        """The value of the worker's `--kv-dtype`."""
        for narrow in ("Int8", "Kivi4"):
            part, has_part, _ = self.value.partition(narrow)
            if part and has_part:
                return f"{part.lower()}={narrow.lower()}"
        return self.value.lower()


class WeightType(enum.StrEnum):
    """Number type of the linear layers of one part of the model."""

    AUTO = "Auto"
    INT8 = "Int8"
    INT4 = "Int4"


class ClaimAccess(enum.StrEnum):
    """The nodes that may mount a claim: many, or one."""

    READ_WRITE_MANY = "ReadWriteMany"
    READ_WRITE_ONCE = "ReadWriteOnce"


class OnOversize(enum.StrEnum):
    """The handling of an image with more pixels than allowed."""

    DOWNSCALE = "Downscale"
    REJECT = "Reject"


class VisualPolicy(enum.StrEnum):
    """What decides how many visual tokens an image gets."""

    OFF = "Off"
    DETAIL = "Detail"
    AUTO = "Auto"


class VisualDefault(enum.StrEnum):
    """The values of the request field `visual`."""

    OFF = "Off"
    LOW = "Low"
    MEDIUM = "Medium"
    HIGH = "High"
    AUTO = "Auto"


class TierMethod(enum.StrEnum):
    """Which visual tokens a tier keeps."""

    NONE = "None"
    DIVERSE = "Diverse"
    ZIP = "Zip"
    MERGE = "Merge"
    POOL = "Pool"
    ARR_COC = "ArrCoc"
    ARR_COC_PYRAMID = "ArrCocPyramid"


class QuestionClassifier(enum.StrEnum):
    """How the class of a question is found."""

    LEARNED = "Learned"
    WORDS = "Words"


class OnContextExceeded(enum.StrEnum):
    """The handling of a request with images that exceeds the context."""

    REFUSE = "Refuse"
    REDUCE_OLDEST = "ReduceOldest"
    DROP_OLDEST = "DropOldest"


class OnCorrupt(enum.StrEnum):
    """The handling of a request with an image that cannot be decoded."""

    REJECT = "Reject"
    SKIP = "Skip"


class ScalingMode(enum.StrEnum):
    """The owner of a pool's replicas: the autoscaler, another scaler, or this manifest."""

    AUTO = "Auto"
    EXTERNAL = "External"
    MANUAL = "Manual"


class WhileAtZero(enum.StrEnum):
    """The handling of an image while the encoder pool is at zero."""

    INLINE_AT_PREFILL = "InlineAtPrefill"
    QUEUE = "Queue"
    REJECT = "Reject"


class DisruptionPolicy(enum.StrEnum):
    """Whether the pool has a PodDisruptionBudget."""

    AUTO = "Auto"
    NONE = "None"


class ServiceType(enum.StrEnum):
    """The type of the gateway's Kubernetes Service."""

    CLUSTER_IP = "ClusterIP"
    NODE_PORT = "NodePort"
    LOAD_BALANCER = "LoadBalancer"


class ClientPriority(enum.StrEnum):
    """The effect of the field `priority` of a request."""

    LATER = "Later"
    ANY = "Any"


class Modality(enum.StrEnum):
    """The kind of input that a request has beside text; TEXT for none."""

    TEXT = "Text"
    IMAGE = "Image"
    VIDEO = "Video"


class AutoscalingPolicy(enum.StrEnum):
    """Whether decisions are applied, only shown, or not made."""

    ACTIVE = "Active"
    ADVISORY = "Advisory"
    OFF = "Off"


class MissingMetrics(enum.StrEnum):
    """The replicas of a pool while too few of its pods answer."""

    HOLD = "Hold"
    FALLBACK = "Fallback"


class OnExceeded(enum.StrEnum):
    """The handling of a request that would wait too long."""

    QUEUE = "Queue"
    REJECT = "Reject"


class IdentityMode(enum.StrEnum):
    """The issuer of the pods' certificates, or plaintext."""

    OPERATOR_CA = "OperatorCA"
    CERT_MANAGER = "CertManager"
    OFF = "Off"


class TransferMode(enum.StrEnum):
    """The transport of KV and embeddings between pods."""

    AUTO = "Auto"
    STREAM = "Stream"
    RDMA = "RDMA"


class RolloutStrategy(enum.StrEnum):
    """The order in which pods of a new revision replace old ones."""

    ROLLING_BY_REVISION = "RollingByRevision"
    RECREATE = "Recreate"


class OnFailure(enum.StrEnum):
    """The handling of a rollout that does not progress."""

    PAUSE = "Pause"
    ROLLBACK = "Rollback"


class NoSpareCapacity(enum.StrEnum):
    """The handling of a rollout whose surge pod fits on no node."""

    DRAIN_FIRST = "DrainFirst"
    WAIT = "Wait"


class Topology(enum.StrEnum):
    """The pools of a service."""

    ENCODER_PREFILL_DECODE = "EncoderPrefillDecode"
    ENCODER_DECODE = "EncoderDecode"
    PREFILL_DECODE = "PrefillDecode"
    DECODE = "Decode"
