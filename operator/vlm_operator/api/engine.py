"""Additions to the worker's command line and environment: `spec.pools.ROLE.engine`."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field

from vlm_operator.api.base import Model, ObjectName, Rule, Rules, field, shaped

# Arguments that the operator sets on every command line (docs/contract.md); users cannot set them.
OWNED_ARGS = (
    "--model", "--served-name", "--model-revision", "--model-cache", "--stages", "--bind",
    "--grpc-port", "--http-port", "--data-port", "--announced-data-port", "--admin-port",
    "--block-size", "--dtype", "--kv-dtype", "--kv-memory-bytes", "--kv-memory-percent",
    "--kv-reserve-percent", "--kv-visual-percent", "--kv-prune-text", "--mark-history",
    "--max-lent-requests", "--max-model-len",
    "--drain-timeout-seconds", "--compat", "--namespace", "--service", "--worker", "--config",
    "--api-keys-dir", "--tls-dir", "--identity-dir",
)  # fmt: skip
OWNED_ENV = (
    "POD_NAME", "POD_UID", "POD_IP", "POD_NAMESPACE", "NODE_NAME",
    "OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_TRACES_SAMPLER_ARG",  # of spec.tracing
)  # fmt: skip
OWNED_ENV_PREFIX = "TRIPTYCH_"

EnvName = Annotated[str, Field(max_length=128, pattern=r"^[-._a-zA-Z][-._a-zA-Z0-9]*$")]
_DATA_KEY = r"^[.]{0,2}[-_A-Za-z0-9][-._A-Za-z0-9]*$"
DataKey = Annotated[
    str,
    Field(min_length=1, max_length=253, pattern=_DATA_KEY),
    shaped("data-key", _DATA_KEY, "is no key of a Secret: write letters, digits, -, _ and ."),
]


def _cel_list(values: tuple[str, ...]) -> str:
    return "[" + ", ".join(f"'{value}'" for value in values) + "]"


OWNED_ARG_RULE = Rule(
    name="owned-args",
    # an abbreviation sets the owned argument, so abbreviations are refused, too
    holds=f"!' {' '.join(OWNED_ARGS)}'.contains(' ' + self.split('=')[0])",
    message="an argument that the operator sets itself: remove it",
    says="self.split('=')[0] + ' is set by the operator: remove it; "
    "what may be chosen has a field of its own'",
)
HELP_ARG_RULE = Rule(
    name="help-args",
    holds="!(self in ['-h', '--help'])",
    message="prints a text and ends: remove it",
)
Argument = Annotated[
    str, Field(min_length=1, max_length=512), Rules(OWNED_ARG_RULE), Rules(HELP_ARG_RULE)
]


class KeySelector(Model):
    """One key of a Secret or ConfigMap."""

    name: ObjectName = field(..., "Name of the object.", example="proxy-settings")
    key: DataKey = field(..., "Key in its data.", example="HTTPS_PROXY")


class EnvSource(Model):
    """The source of a variable's value."""

    secret_key_ref: KeySelector | None = field(None, "A key of a Secret.")
    config_map_key_ref: KeySelector | None = field(None, "A key of a ConfigMap.")

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            name="env-source",
            holds="has(self.secretKeyRef) != has(self.configMapKeyRef)",
            message="set exactly one of secretKeyRef and configMapKeyRef",
        ),
    )


class EnvVar(Model):
    """One environment variable."""

    name: EnvName = field(..., "Name of the variable.", example="OMP_NUM_THREADS")
    value: str | None = field(
        None, "Value of the variable.", example="4", unset="empty", max_length=4096
    )
    value_from: EnvSource | None = field(None, "Source of the value.")

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            name="env-value",
            holds="!(has(self.value) && has(self.valueFrom))",
            message="set value or valueFrom, not both",
            says="self.name + ': set value or valueFrom, not both'",
            at=".value",
        ),
        Rule(
            name="owned-env",
            holds=f"!(self.name in {_cel_list(OWNED_ENV)}) && "
            f"!self.name.startsWith('{OWNED_ENV_PREFIX}')",
            message="a variable that the operator sets itself: remove it",
            says="self.name + ' is set by the operator: remove it'",
            at=".name",
        ),
    )


class Engine(Model):
    """Additions to the worker's command line and environment."""

    extra_args: list[Argument] = field(
        [],
        "Additional arguments; see `vlm-worker ROLE --help`.",
        example=["--max-requests=64"],
        max_length=64,
    )
    env: list[EnvVar] = field([], "Additional environment variables.", keys="name", max_length=64)
