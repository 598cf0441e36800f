"""The model and the limits of requests: `spec.model`."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from vlm_operator.api.base import (
    DNS_SUBDOMAIN,
    IMAGE_NAME,
    Bytes,
    Model,
    NameRef,
    ObjectName,
    Restarts,
    Rule,
    field,
    not_built,
)
from vlm_operator.api.engine import KeySelector
from vlm_operator.api.enums import (
    ClaimAccess,
    DType,
    KvDType,
    OnCorrupt,
    OnOversize,
    WeightType,
)
from vlm_operator.api.pod_template import PodTemplate
from vlm_operator.api.visual import Visual

ModelUri = Annotated[str, Field(min_length=1, max_length=512)]
ServedName = Annotated[
    str, Field(min_length=1, max_length=128, pattern=r"^[A-Za-z0-9][-A-Za-z0-9._/:]*$")
]
_URI_FORMS = "pvc://CLAIM[/PATH], hf://ORG/NAME, s3://BUCKET[/PATH] or oci://IMAGE[#DIRECTORY]"
_DOWNLOADED = "self.uri.startsWith('hf://') || self.uri.startsWith('s3://')"
BlockSize = Literal[4, 8, 16, 32, 64, 128, 256]


class Limits(Model):
    """The limits of a request. A change takes effect within seconds and restarts nothing."""

    images_per_request: int = field(
        4, "Images in one request; 0 refuses all.", example=8, ge=0, le=64
    )
    bytes_per_image: int = field(
        20 * 2**20, "Bytes of one image as sent.", example=5242880, ge=1, le=2**30
    )
    pixels_per_image: int = field(
        16_777_216,
        "Pixels of one image, width times height; onOversize says what happens above it.",
        example=4194304,
        ge=1,
        le=2**40,
    )
    on_oversize: OnOversize = field(
        OnOversize.DOWNSCALE,
        "An image above pixelsPerImage is scaled down, or refused with a 400.",
        example="Reject",
    )
    on_corrupt: OnCorrupt = field(
        OnCorrupt.REJECT,
        "An image that cannot be decoded refuses the request with a 400, or is left out.",
        example="Reject",
    )
    visual: Visual | None = field(
        None,
        "How many visual tokens images get (docs/visual-tokens.md).",
        unset="all that the model makes",
    )
    video_seconds: int = field(
        0, "Seconds of video in one request; 0 refuses all.", example=0, ge=0, le=600
    )

    rules: ClassVar[tuple[Rule, ...]] = (
        not_built(
            "video",
            "!has(self.videoSeconds) || self.videoSeconds == 0",
            "video input",
            at=".videoSeconds",
            instead="set 0 or leave it out",
        ),
    )


_PARTS = ("encoder", "merger", "layers", "head")
Sha256 = Annotated[str, Field(pattern="^[0-9a-f]{64}$", max_length=64)]


def _part(what: str) -> WeightType:
    """The field of a part; `what` says which linear layers it has."""
    found: WeightType = field(WeightType.AUTO, what, example="Int8", restarts=Restarts.PODS)
    return found


class ActivationScales(Model):
    """A file of `vlm-worker calibrate`."""

    config_map_key_ref: KeySelector = field(
        ..., "ConfigMap of the same namespace, and its key.", restarts=Restarts.PODS
    )
    sha256: Sha256 = field(
        ...,
        "The sha256 in the file. Pods with another file do not start.",
        example="9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08",
        restarts=Restarts.PODS,
    )


class Weights(Model):
    """Number types of the linear layers, by part of the model; Auto is `dtype`."""

    encoder: WeightType = _part("The vision tower without its merger. Int4 needs a GPU.")
    merger: WeightType = _part("From the tower to the language model.")
    layers: WeightType = _part("The layers of the language model.")
    head: WeightType = _part("The logits. Auto if the head shares the embedding table's weights.")
    activation_scales: ActivationScales | None = field(
        None,
        "Measured scales of what Int8 layers multiply, on CPUs.",
        unset="from each token",
        restarts=Restarts.PODS,
    )

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            name="scales-int8",
            holds="!has(self.activationScales) || "
            + " || ".join(f"(has(self.{part}) && self.{part} == 'Int8')" for part in _PARTS),
            message="needs a part of type Int8: set one, or remove it",
            at=".activationScales",
        ),
    )

    @property
    def text(self) -> str:
        """The value of the worker's --weights; `auto` if no part is rounded."""
        types = {part: getattr(self, part) for part in _PARTS}
        rounded = [f"{part}={kind.lower()}" for part, kind in types.items() if kind != "Auto"]
        return ",".join(rounded) or "auto"


class CacheClaim(Model):
    """The PersistentVolumeClaim that holds one revision of the model."""

    size: Bytes = field(
        ...,
        "Bytes of the volume: those of the model's files, and 16 MiB more.",
        example="50Gi",
        restarts=Restarts.PODS,
    )
    storage_class_name: ObjectName | None = field(
        None,
        "StorageClass of the volume.",
        example="fast-rwx",
        unset="the cluster's default class",
        restarts=Restarts.PODS,
    )
    access_modes: list[ClaimAccess] = field(
        [ClaimAccess.READ_WRITE_MANY],
        "Access modes of the volume. ReadWriteOnce suffices if all pods run on one node.",
        example=["ReadWriteOnce"],
        restarts=Restarts.PODS,
        min_length=1,
        max_length=2,
    )


class ModelCache(Model):
    """One download of the model for all pods, by a Job of the operator into a claim."""

    claim: CacheClaim = field(..., "The claim. A change makes a new one and downloads again.")
    pod_template: PodTemplate = field(
        PodTemplate(),
        "Changes to the pod template of the Job, for example variables of a mirror or a proxy. Its "
        "container is named fetch. A change replaces a Job that has not completed.",
        restarts=Restarts.NONE,
    )


class ModelSource(Model):
    """The model, and its number types and block size in memory."""

    uri: ModelUri = field(
        ...,
        "Where the weights are: pvc://CLAIM[/PATH] (a claim of the same namespace, mounted "
        "read-only), hf://ORG/NAME (downloaded by each pod), s3://BUCKET[/PATH] (only with "
        "cache) or oci://IMAGE[#DIRECTORY] (an image volume: each node pulls it once; Kubernetes "
        "1.35, or the feature gate ImageVolume).",
        example="pvc://shapes",
        restarts=Restarts.PODS,
    )
    revision: str | None = field(
        None,
        "Commit or tag of the model; required for hf://, where a name alone may move. For s3:// "
        "any text: another one downloads again.",
        example="8f4592b9a2fd38cf9d2e9f6ae45a0a4cdd5a4d3f",
        unset="none",
        restarts=Restarts.PODS,
        min_length=1,
        max_length=128,
    )
    served_name: ServedName | None = field(
        None,
        "The name that clients put into `model`. Immutable.",
        example="qwen2.5-vl",
        unset="metadata.name",
        restarts=Restarts.NONE,
    )
    max_model_len: int | None = field(
        None,
        "Tokens of prompt and answer together, image tokens included.",
        example=4096,
        unset="the checkpoint's own",
        restarts=Restarts.PODS,
        ge=64,
        le=2**24,
    )
    dtype: DType = field(
        DType.AUTO,
        "Number type of weights and activations; Auto is the checkpoint's, alike in every role.",
        example="BFloat16",
        restarts=Restarts.PODS,
    )
    kv_cache_dtype: KvDType = field(
        KvDType.AUTO,
        "Number type of the KV cache; Auto is that of the activations. Int8 and FP8 keep a scale "
        "per token and head; FP8 needs GPUs of compute capability 8.9 or later. VisionInt8 and "
        "TextInt8 store one modality in Int8, VisionKivi4 stores images in 4 bits, on CPUs.",
        example="BFloat16",
        restarts=Restarts.PODS,
    )
    weights: Weights | None = field(
        None,
        "Linear layers rounded at start, by part, alike in every role: faster and smaller, less "
        "exact. A worker whose model cannot round a part does not start.",
        unset="Auto in every part",
        restarts=Restarts.PODS,
    )
    block_size_tokens: BlockSize | None = field(
        None,
        "Tokens in one KV block, one value for the whole service.",
        example=16,
        unset="64 where no prefill or decode variant asks for an accelerator, else 16; "
        "32 with VisionKivi4",
        restarts=Restarts.PODS,
    )
    start_timeout_seconds: int | None = field(
        None,
        "Time that a pod has to download and load the model and to warm up, in seconds. Then it "
        "restarts.",
        example=7200,
        unset="1800",
        restarts=Restarts.PODS,
        ge=60,
        le=86400,
    )
    limits: Limits = field(
        Limits(), "Limits of one request. A change restarts nothing.", restarts=Restarts.NONE
    )
    credentials_secret_ref: NameRef | None = field(
        None,
        "Secret for models that need one: for hf:// with the key `token`, for s3:// with "
        "AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and, if used, AWS_SESSION_TOKEN.",
        unset="anonymous",
        restarts=Restarts.PODS,
    )
    cache: ModelCache | None = field(
        None,
        "One download of an hf:// or s3:// model into a claim that all pods mount. Pods of a "
        "revision start when its model is complete, so no accelerator waits for a download.",
        unset="each pod downloads the model",
        restarts=Restarts.PODS,
    )

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            name="uri-form",
            holds="(self.uri.startsWith('oci://') && "
            f"self.uri.substring(6).split('#')[0].matches(r'{IMAGE_NAME}') && "
            "self.uri.matches('^[^#]+(#[-A-Za-z0-9._]+(/[-A-Za-z0-9._]+)*)?$')) || "
            f"(self.uri.matches('^pvc://{DNS_SUBDOMAIN}(/[-A-Za-z0-9._]+)*/?$') && "
            "self.uri.split('/')[2].size() < 254) || "
            "self.uri.matches('^hf://[-A-Za-z0-9._]+/[-A-Za-z0-9._]+$') || "
            "self.uri.matches('^s3://[a-z0-9][-.a-z0-9]{1,61}[a-z0-9](/[-A-Za-z0-9._]+)*/?$')",
            message=f"must be {_URI_FORMS}",
            says=f"'must be {_URI_FORMS}, not ' + self.uri",
            at=".uri",
        ),
        Rule(
            name="uri-path",
            holds="!self.uri.replace('#', '/').split('/').exists(p, p == '..' || p == '.')",
            message="a path in a model uri has no . or .. parts",
            at=".uri",
        ),
        Rule(
            name="hf-revision",
            holds="!self.uri.startsWith('hf://') || has(self.revision)",
            message="is required for hf:// models: set the commit to serve",
            says="'is required for ' + self.uri + ': set the commit to serve, a name may move'",
            at=".revision",
            reason="FieldValueRequired",
        ),
        Rule(
            name="credentials-remote",
            holds=f"!has(self.credentialsSecretRef) || {_DOWNLOADED}",
            message="is only read for hf:// and s3:// models: remove it",
            at=".credentialsSecretRef",
        ),
        Rule(
            name="cache-remote",
            holds=f"!has(self.cache) || {_DOWNLOADED}",
            message="is only for hf:// and s3:// models: remove it, pods mount pvc:// and oci:// "
            "as they are",
            at=".cache",
        ),
        Rule(
            name="s3-cache",
            holds="!self.uri.startsWith('s3://') || has(self.cache)",
            message="is required for s3:// models: set cache.claim, a Job downloads into it",
            at=".cache",
            reason="FieldValueRequired",
        ),
        Rule(
            name="cache-commit",
            holds="!has(self.cache) || !self.uri.startsWith('hf://') || !has(self.revision) || "
            "self.revision.matches('^[0-9a-f]{40}$')",
            message="must be a commit of 40 hexadecimal digits with model.cache: a tag may move",
            says="'must be a commit of 40 hexadecimal digits with model.cache, a tag may move, "
            "not ' + self.revision",
            at=".revision",
        ),
        Rule(
            name="served-name-immutable",
            holds="has(self.servedName) == has(oldSelf.servedName) && "
            "(!has(self.servedName) || self.servedName == oldSelf.servedName)",
            message="is immutable, clients ask for it by name: create another VLMService",
            at=".servedName",
        ),
    )
