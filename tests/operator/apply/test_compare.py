"""Is the live object what we applied? As the API server writes it, and as others do."""

import copy

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vlm_operator.apply.compare import difference, stamped

WANTED = {
    "kind": "Deployment",
    "metadata": {"name": "a", "labels": {"x": "1"}},
    "spec": {
        "replicas": 2,
        "volumes": [],
        "containers": [
            {
                "name": "worker",
                "args": ["a", "b"],
                "resources": {"limits": {"cpu": "0.5", "memory": "1024Mi"}, "requests": {}},
                "env": [{"name": "A", "value": "1"}, {"name": "B", "value": ""}],
            }
        ],
        "ports": [{"protocol": "UDP", "port": 53}, {"protocol": "TCP", "port": 53}],
    },
}


def live(**changes):
    found = copy.deepcopy(WANTED)
    found["metadata"] |= {"uid": "u", "annotations": {"theirs": "1"}}
    found["spec"].pop("volumes")
    found["status"] = {"replicas": 2}
    container = found["spec"]["containers"][0]
    container |= {"imagePullPolicy": "Always"}
    container["resources"] = {"limits": {"cpu": "500m", "memory": "1Gi"}}
    container["env"] = [{"name": "B"}, {"name": "A", "value": "1"}]
    found["spec"] |= changes
    return found


def test_what_the_server_adds_drops_and_rewrites_is_no_drift():
    assert difference(live(), WANTED) is None


@pytest.mark.parametrize(
    ("change", "path"),
    [
        ({"replicas": 3}, ".spec.replicas"),
        ({"containers": []}, ".spec.containers[0].name"),
        ({"containers": [live()["spec"]["containers"][0], {"name": "theirs"}]}, ".spec.containers"),
        ({"ports": [{"protocol": "UDP", "port": 53}]}, ".spec.ports"),
    ],
    ids=["a value", "an item gone", "an item more", "an unkeyed list"],
)
def test_what_others_change_is_found_by_its_path(change: dict, path: str):
    assert difference(live(**change), WANTED) == path


def test_a_changed_quantity_is_drift():
    found = live()
    found["spec"]["containers"][0]["resources"]["limits"]["cpu"] = "2"
    assert difference(found, WANTED) == ".spec.containers[0].resources.limits.cpu"


def test_the_digest_tells_manifests_apart_whatever_their_order():
    one = stamped(WANTED)
    turned = {key: WANTED[key] for key in reversed(WANTED)}
    assert stamped(turned) == one
    other = {**WANTED, "spec": {**WANTED["spec"], "replicas": 3}}
    assert stamped(other)["metadata"] != one["metadata"]
    assert "annotations" not in WANTED["metadata"]


values = st.recursive(
    st.one_of(st.integers(0, 9), st.text("ab", min_size=1, max_size=3), st.booleans()),
    lambda inner: st.one_of(
        st.dictionaries(st.sampled_from(["a", "b", "c"]), inner, min_size=1, max_size=3),
        st.lists(inner, min_size=1, max_size=3),
    ),
    max_leaves=12,
)


@given(values)
def test_everything_is_like_itself(value):
    assert difference(value, value) is None
    assert difference(copy.deepcopy(value), value) is None
