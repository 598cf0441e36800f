"""Names of children fit, never clash, and never move."""

from hypothesis import given, settings
from hypothesis import strategies as st

from vlm_operator import names

labels = st.from_regex(r"[a-z]([-a-z0-9]{0,38}[a-z0-9])?", fullmatch=True)
variants = st.from_regex(r"[a-z0-9]([-a-z0-9]{0,18}[a-z0-9])?", fullmatch=True)
revisions = st.from_regex(r"[0-9a-f]{8}", fullmatch=True)


@settings(deadline=None)
@given(labels, st.sampled_from(names.Role), variants, revisions)
def test_every_name_is_a_label_and_leaves_pods_their_hostname(
    service: str, role: names.Role, variant: str, revision: str
) -> None:
    name = names.deployment(service, role, variant, revision)
    # Kubernetes appends a ReplicaSet's hash and a pod's own five letters.
    assert len(f"{name}-{'x' * 10}-{'x' * 5}") <= names.MAX_NAME
    assert len(names.child(service, role)) <= names.MAX_NAME
    assert name[-1].isalnum()


@settings(deadline=None)
@given(st.text("ab-", min_size=1, max_size=120), st.text("ab-", min_size=1, max_size=120))
def test_unlike_names_stay_unlike(one: str, other: str) -> None:
    assert (names.bounded(one) == names.bounded(other)) == (one == other)


def test_a_name_that_fits_is_kept_before_its_digest() -> None:
    name = names.deployment("demo", names.Role.DECODE, "default", "1a2b3c4d")
    assert name == "demo-decode-default-334b6b69"


def test_a_long_name_is_the_same_tomorrow() -> None:
    long = names.deployment("a" * 40, names.Role.ENCODER, "b" * 20, "1a2b3c4d")
    assert long == f"{'a' * 28}-18eefa93-ba62fcc1"
