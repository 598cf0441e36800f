"""The label of weights, of all values that settings accept."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator

import pytest

from vlm_worker.annotations import MAX_LABEL
from vlm_worker.core.families import FAMILIES
from vlm_worker.errors import InvalidRequestError
from vlm_worker.types import Role, Stage
from vlm_worker.weights import AUTO, PARTS, TYPES, Part, canonical, label, rounded_types
from vlm_worker.wire import messages

DTYPES = ("bfloat16", "float32", "float16")
SCALES = ("", "0" * 64, "0123456789ab" + "f" * 52)
ALLOWED = sorted({tuple(sorted(spec.int8)) for spec in FAMILIES.values()})


def _values() -> Iterator[str]:
    """Every value of `--weights`, in every order of its parts."""
    yield from TYPES
    for num_parts in range(1, len(PARTS) + 1):
        for parts in itertools.permutations(PARTS, num_parts):
            for types in itertools.product(TYPES, repeat=num_parts):
                yield ",".join(f"{part}={kind}" for part, kind in zip(parts, types, strict=True))


def _hello(text: str) -> messages.Hello:
    return messages.Hello(
        role=Role.DECODE,
        stages=frozenset({Stage.DECODE}),
        model="m",
        model_revision="r",
        pod_name="p",
        pod_uid="u",
        boot_id=b"b" * 16,
        layout_fingerprint=b"l" * 16,
        embed_fingerprint=b"e" * 16,
        compat="c",
        weights=text,
        limits=messages.Limits(64, 4096, 2048, 8),
    )


def test_a_hello_carries_every_label_that_settings_can_make() -> None:
    longest = ""
    for allowed in (*ALLOWED, PARTS):
        texts = {canonical(text) for text in _values()}
        for text, dtype, scales in itertools.product(texts, DTYPES, SCALES):
            longest = max(longest, label(text, allowed, dtype=dtype, scales_sha256=scales), key=len)
    sent = _hello(longest)
    assert messages.HELLO.decode(messages.HELLO.encode(sent)) == sent
    with pytest.raises(InvalidRequestError, match="weights"):
        messages.HELLO.decode(messages.HELLO.encode(_hello("x" * (MAX_LABEL + 1))))


@pytest.mark.parametrize("allowed", ALLOWED)
def test_labels_are_equal_exactly_for_equal_weights(allowed: tuple[Part, ...]) -> None:
    labels, weights = defaultdict(set), defaultdict(set)
    for text, dtype, scales in itertools.product(_values(), DTYPES, SCALES):
        try:
            types = rounded_types(text, allowed)
        except ValueError:
            continue  # this family refuses it at start
        made = label(text, allowed, dtype=dtype, scales_sha256=scales)
        identity = (tuple(types.items()) or dtype, scales)
        labels[identity].add(made)
        weights[made].add(identity)
    assert all(len(found) == 1 for found in labels.values())
    assert all(len(found) == 1 for found in weights.values())


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (AUTO, "bfloat16"),
        ("int4", "int4"),
        ("head=int8,layers=int8", "layers=int8,head=int8"),
        ("encoder=int8,merger=int8,layers=int8,head=int8", "int8"),
        ("encoder=int8,merger=int8,layers=int8,head=int4", "int8,head=int4"),
        ("encoder=int4,merger=int8,layers=int4,head=int8", "int8,encoder=int4,layers=int4"),
    ],
)
def test_a_label_names_few_parts(text: str, told: str) -> None:
    assert label(text, PARTS, dtype="bfloat16") == told
