"""Declares fields of the API: type, limits, validation rules, and what a change restarts.

`vlm_cli.definitions` writes all of it into the CustomResourceDefinitions. So one declaration serves
`kubectl explain`, the API server and the operator.
"""

from __future__ import annotations

import dataclasses
import enum
from typing import Annotated, Any, ClassVar, Self, cast

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    model_validator,
)
from pydantic import WithJsonSchema as Schema
from pydantic.alias_generators import to_camel, to_snake

from vlm_operator import names

# Keys of the JSON schema that only `vlm_cli.definitions` reads; none reaches the API server.
KEY_RESTARTS = "x-triptych-restarts"
KEY_UNSET = "x-triptych-unset"
KEY_MAP_KEYS = "x-kubernetes-list-map-keys"

OPEN_OBJECT = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
_QUANTITY = r"^[0-9]+(\.[0-9]+)?([KMGTPE]i|[numkMGTPE]|[eE][-+]?[0-9]{1,2})?$"
_COUNT_OR_PERCENT = r"^(1000|[0-9]{1,3}|[0-9]{1,2}%|100%)$"
_DEFAULT_REASON = "FieldValueInvalid"


class Restarts(enum.StrEnum):
    """What a change of a field restarts; tested by tests/contracts/test_restart_classes.py."""

    NONE = "none"
    GATEWAY = "gateway"
    PODS = "pods"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One CEL rule, evaluated by the API server on the object that declares it.

    Attributes:
        name: identifies the rule in tests only.
        holds: CEL over `self` (and `oldSelf`); true if the object is valid.
        message: what is wrong and what to write instead.
        at: path of the invalid field relative to `self`, for example `.scaling.replicas`.
        says: CEL expression of a message with values; `message` is then only for the docs.
        reason: reason in the API server's error; `FieldValueForbidden` marks unsupported fields.
    """

    name: str
    holds: str
    message: str
    at: str = ""
    says: str | None = None
    reason: str = _DEFAULT_REASON

    def schema(self) -> dict[str, Any]:
        entry = {"rule": self.holds}
        entry |= {"messageExpression": self.says} if self.says else {"message": self.message}
        if self.at:
            entry["fieldPath"] = self.at
        if self.reason != _DEFAULT_REASON:
            entry["reason"] = self.reason
        return entry


def not_built(name: str, holds: str, what: str, *, at: str = "", instead: str = "") -> Rule:
    """Return a rule that refuses the setting `what`, which is not implemented yet.

    `holds` is CEL that is true if the setting is not used. `instead` says what to write.
    """
    hint = f"; {instead}" if instead else ""
    return Rule(
        name=name,
        holds=holds,
        message=f"not built yet: {what}{hint}",
        at=at,
        reason="FieldValueForbidden",
    )


@dataclasses.dataclass(frozen=True, slots=True)
class Rules:
    """Adds a rule to a scalar or a map: `Annotated[str, Rules(rule)]`. The path is the field's."""

    rule: Rule

    def __get_pydantic_json_schema__(
        self, core_schema: Any, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        schema = handler(core_schema)
        rules = [*schema.get("x-kubernetes-validations", []), self.rule.schema()]
        return {**schema, "x-kubernetes-validations": rules}


def shaped(name: str, pattern: str, message: str) -> Rules:
    """Return a rule with a readable message for a pattern; use it beside a Field with that pattern.

    The CustomResourceDefinition then has the rule instead of the pattern (`vlm_cli.definitions`).
    `pattern` is an RE2 expression without a single quote.
    """
    return Rules(Rule(name=name, holds=f"self.matches(r'{pattern}')", message=message))


def keyed(name: str, pattern: str) -> Rules:
    """Return a rule that all keys of a map match `pattern`, an RE2 expression."""
    return Rules(
        Rule(
            name=name,
            holds=f"self.all(k, k.indexOf('/') < 254 && k.matches(r'{pattern}'))",
            message="a key must be [DOMAIN/]NAME, NAME of at most 63 letters, digits, -, _ and ., "
            "with a letter or digit at both ends",
        )
    )


class Model(BaseModel):
    """A frozen object of the API: camelCase in YAML; unknown fields are errors."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", alias_generator=to_camel, populate_by_name=True
    )
    rules: ClassVar[tuple[Rule, ...]] = ()

    @classmethod
    def __get_pydantic_json_schema__(
        cls, core_schema: Any, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        schema = handler.resolve_ref_schema(handler(core_schema))
        if cls.rules:
            schema["x-kubernetes-validations"] = [rule.schema() for rule in cls.rules]
        return schema

    @model_validator(mode="after")
    def _check_keys(self) -> Self:
        """Refuse two list items with equal keys, as the API server does."""
        for name, info in type(self).model_fields.items():
            extra = info.json_schema_extra
            if isinstance(extra, dict) and KEY_MAP_KEYS in extra:
                (key,) = cast("list[str]", extra[KEY_MAP_KEYS])
                values = [getattr(item, to_snake(key)) for item in getattr(self, name) or ()]
                twice = sorted({str(item) for item in values if values.count(item) > 1})
                if twice:
                    message = f"{to_camel(name)}: two items with the {key} {twice[0]}"
                    raise ValueError(message)
        return self

    def to_dict(self) -> dict[str, Any]:
        """Return the object with the names of YAML, without unset fields."""
        return self.model_dump(mode="json", by_alias=True, exclude_none=True)


def field(
    default: Any,
    description: str,
    *,
    example: Any = None,
    unset: str | None = None,
    restarts: Restarts | None = None,
    keys: str | None = None,
    **limits: Any,
) -> Any:
    """Declare a field of the API.

    Args:
        default: value if the user wrote none; `...` makes the field required.
        description: meaning of the field, with its unit.
        example: a realistic value; objects have none, their fields do.
        unset: description of a default that is not a constant.
        restarts: what a change restarts; None if the enclosing field declares it.
        keys: the field that identifies items of a list; server-side apply merges items by it.
        limits: pydantic's ge, le, min_length, max_length, pattern.
    """
    extra: dict[str, Any] = {}
    if unset is not None:
        extra[KEY_UNSET] = unset
    if restarts is not None:
        extra[KEY_RESTARTS] = restarts.value
    if keys is not None:
        extra |= {"x-kubernetes-list-type": "map", KEY_MAP_KEYS: [keys]}
    if example is not None:
        extra["example"] = example
    return Field(default, description=description, json_schema_extra=extra, **limits)


def _int_or_string(pattern: str, **bounds: int) -> dict[str, Any]:
    """Return a schema of strings and integers: the pattern limits strings, the bounds integers."""
    return {"pattern": pattern, **bounds, "x-kubernetes-int-or-string": True}


# A Kubernetes quantity: 40Gi, 1500m, 2.5. The text is kept; `quantity.parse` converts it.
Quantity = Annotated[
    str,
    Field(pattern=_QUANTITY, max_length=64),
    BeforeValidator(lambda value: str(value) if isinstance(value, int) else value),
    Schema(_int_or_string(_QUANTITY, minimum=0)),
]
# CEL: the last letter is a unit below 1. The API server's cost estimate of `endsWith` grows with
# the string; charAt and size cost one step each.
_BELOW_ONE = "{0}.size() > 0 && {0}.charAt({0}.size() - 1) in ['m', 'u', 'n']"


def whole_bytes(value: str) -> str:
    """Return CEL that is true for an integer, or a quantity without a unit below 1."""
    return f"(type({value}) == int || !({_BELOW_ONE.format(value)}))"


# A quantity of bytes. Kubernetes accepts 512m, which is half a byte.
Bytes = Annotated[
    Quantity,
    Rules(
        Rule(
            name="bytes-unit",
            holds=whole_bytes("self"),
            message="in m, u or n is in parts of a byte: write Mi, as 512Mi",
        )
    ),
]
# A count of pods or a share of them: 1 or 25%.
CountOrPercent = Annotated[
    str,
    Field(pattern=_COUNT_OR_PERCENT, max_length=64),
    BeforeValidator(lambda value: str(value) if isinstance(value, int) else value),
    Schema(_int_or_string(_COUNT_OR_PERCENT, minimum=0, maximum=1000)),
]
# An object of a Kubernetes type. The API server validates it in a dry run.
Open = Annotated[dict[str, Any], Schema(OPEN_OBJECT)]

_DNS_LABEL = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"
DNS_SUBDOMAIN = "[a-z0-9]+((-+|[.])[a-z0-9]+)*"
_QUALIFIED = "[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?"
EXTENDED_RESOURCE = f"^{DNS_SUBDOMAIN}/{_QUALIFIED}$"
LABEL_KEY = f"^({DNS_SUBDOMAIN}/)?{_QUALIFIED}$"
# The API server converts an annotation's key to lower case before it validates it.
ANNOTATION_KEY = f"^([A-Za-z0-9]+((-+|[.])[A-Za-z0-9]+)*/)?{_QUALIFIED}$"
LABEL_VALUE = f"^({_QUALIFIED})?$"
IMAGE_NAME = (
    r"^(([-A-Za-z0-9.]+|\[[0-9a-f:]+\])(:[0-9]+)?/)?[a-z0-9]+(([.]|_{1,2}|-+|/)[a-z0-9]+)*"
    "(:[A-Za-z0-9_][-A-Za-z0-9_.]{0,127})?"
    "(@(sha256:[0-9a-f]{64}|sha384:[0-9a-f]{96}|sha512:[0-9a-f]{128}))?$"
)
VariantName = Annotated[str, Field(max_length=names.MAX_VARIANT_NAME, pattern=_DNS_LABEL)]
ObjectName = Annotated[str, Field(max_length=253, pattern=f"^{DNS_SUBDOMAIN}$")]
ImageName = Annotated[
    str,
    Field(min_length=1, max_length=512, pattern=IMAGE_NAME),
    shaped(
        "image-name",
        IMAGE_NAME,
        "is no image: write [REGISTRY/]REPOSITORY:TAG or @sha256: and 64 hexadecimal digits, the "
        "repository in lower case",
    ),
]
LabelKey = Annotated[str, Field(max_length=317)]
LabelValue = Annotated[
    str,
    Field(max_length=63, pattern=LABEL_VALUE),
    shaped(
        "label-value",
        LABEL_VALUE,
        "is no label value: write letters, digits, -, _ and ., with a letter or digit at both ends",
    ),
]
AnnotationValue = Annotated[str, Field(max_length=4096)]
ResourceName = Annotated[str, Field(min_length=1, max_length=253)]
# Resource names that Kubernetes reserves: its own resources, and quotas on requests.
RESERVED_DOMAINS = (
    "kubernetes.io/ and requests. are Kubernetes' own: write the vendor's name, as nvidia.com/gpu"
)


def own_domain(name: str) -> str:
    """Return CEL that is true for a resource name that Kubernetes does not reserve."""
    return f"(!{name}.contains('kubernetes.io/') && !{name}.startsWith('requests.'))"


DeviceName = Annotated[
    str,
    Field(min_length=1, max_length=253, pattern=EXTENDED_RESOURCE),
    shaped(
        "device-name",
        EXTENDED_RESOURCE,
        "is no extended resource: write DOMAIN/NAME, as nvidia.com/gpu",
    ),
    Rules(Rule(name="device-domain", holds=own_domain("self"), message=RESERVED_DOMAINS)),
]
Time = Annotated[str, Field(max_length=64), Schema({"type": "string", "format": "date-time"})]


class NameRef(Model):
    """A reference to another object by name."""

    name: ObjectName = field(..., "Name of the object.", example="my-secret")
