"""Is the live object what we applied? As the API server writes it, and as others do."""

import copy

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vlm_operator.apply.compare import drift, patch, with_digest

WANTED = {
    "apiVersion": "apps/v1",
    "kind": "Deployment",
    "metadata": {"name": "a", "namespace": "ns", "labels": {"x": "1"}},
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


def learned():
    """What a dry run of the manifest answers."""
    found = copy.deepcopy(WANTED)
    found["spec"]["containers"][0]["imagePullPolicy"] = "Always"
    return [found]


def paths(found, wanted=WANTED, answers=None):
    return [item.path for item in drift(found, wanted, learned() if answers is None else answers)]


def test_what_the_server_adds_drops_and_rewrites_is_no_drift():
    assert paths(live()) == []


def test_what_others_add_is_drift_by_its_path():
    found = live(paused=True, selector={"x": "y"})
    found["metadata"]["labels"]["theirs"] = "1"
    found["metadata"]["finalizers"] = ["theirs"]
    found["spec"]["containers"][0]["lifecycle"] = {"preStop": {}}
    assert paths(found) == [
        "spec.containers[0].lifecycle",
        "spec.paused",
        "spec.selector",
    ]


def test_a_changed_default_is_drift():
    found = live()
    found["spec"]["containers"][0]["imagePullPolicy"] = "Never"
    assert paths(found) == ["spec.containers[0].imagePullPolicy"]


def test_while_nothing_is_learned_additions_to_selectors_alone_are_drift():
    wanted = {**WANTED, "spec": {**WANTED["spec"], "selector": {"matchLabels": {"a": "1"}}}}
    found = live(selector={"matchLabels": {"a": "1", "x": "y"}}, paused=True)
    assert [item.path for item in drift(found, wanted, None)] == ["spec.selector.matchLabels.x"]


def test_an_injected_item_is_the_servers_and_a_changed_one_is_not():
    sidecar = {"name": "sidecar", "image": "mesh:1"}
    answers = learned()
    answers[0]["spec"]["containers"].append(sidecar)
    found = live()
    found["spec"]["containers"].append(copy.deepcopy(sidecar))
    assert paths(found, answers=answers) == []
    found["spec"]["containers"][1]["image"] = "theirs:1"
    assert paths(found, answers=answers) == ["spec.containers"]


def test_an_item_in_a_list_that_is_empty_with_us_is_drift():
    assert paths(live(volumes=[{"name": "theirs"}])) == ["spec.volumes"]


@pytest.mark.parametrize(
    ("kind", "spec"),
    [
        ("Service", {"clusterIP": "10.0.0.1", "clusterIPs": ["10.0.0.1"], "ipFamilies": ["IPv4"]}),
        ("Service", {"healthCheckNodePort": 30000, "ports": [{"port": 1, "nodePort": 30001}]}),
        ("VLMPool", {"replicas": 3}),
    ],
)
def test_what_the_server_assigns_is_its_own(kind: str, spec: dict):
    wanted = {"kind": kind, "metadata": {"name": "a"}, "spec": {"ports": [{"port": 1}]}}
    found = {**wanted, "spec": {**wanted["spec"], **spec}}
    assert paths(found, wanted, [wanted]) == []


def test_a_patch_takes_out_keys_and_replaces_lists():
    found = live(paused=True)
    found["spec"]["containers"][0]["env"].append({"name": "THEIRS", "value": "1"})
    told = patch(WANTED, drift(found, WANTED, learned()))
    assert told == {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": "a", "namespace": "ns"},
        "spec": {"paused": None, "containers": WANTED["spec"]["containers"]},
    }


@pytest.mark.parametrize(
    ("change", "path"),
    [
        ({"replicas": 3}, "spec.replicas"),
        ({"containers": []}, "spec.containers[0].name"),
        ({"containers": [live()["spec"]["containers"][0], {"name": "theirs"}]}, "spec.containers"),
        ({"ports": [{"protocol": "UDP", "port": 53}]}, "spec.ports"),
    ],
    ids=["a value", "an item gone", "an item more", "an unkeyed list"],
)
def test_what_others_change_is_found_by_its_path(change: dict, path: str):
    assert paths(live(**change))[0] == path


def test_a_changed_quantity_is_drift():
    found = live()
    found["spec"]["containers"][0]["resources"]["limits"]["cpu"] = "2"
    assert paths(found) == ["spec.containers[0].resources.limits.cpu"]


def test_a_number_that_is_no_quantity_is_compared_as_written():
    found = live()
    found["spec"]["containers"][0]["env"][1]["value"] = "1000m"
    assert paths(found) == ["spec.containers[0].env[0].value"]


def test_the_digest_tells_manifests_apart_whatever_their_order():
    one = with_digest(WANTED)
    turned = {key: WANTED[key] for key in reversed(WANTED)}
    assert with_digest(turned) == one
    other = {**WANTED, "spec": {**WANTED["spec"], "replicas": 3}}
    assert with_digest(other)["metadata"] != one["metadata"]
    assert "annotations" not in WANTED["metadata"]


values = st.recursive(
    st.one_of(st.integers(0, 9), st.text("ab", min_size=1, max_size=3), st.booleans()),
    lambda inner: st.one_of(
        st.dictionaries(st.sampled_from(["a", "b", "c"]), inner, min_size=1, max_size=3),
        st.lists(inner, min_size=1, max_size=3),
    ),
    max_leaves=12,
)


objects = st.fixed_dictionaries({"kind": st.just("Any"), "spec": values})


@given(objects)
def test_everything_is_like_itself(value):
    assert drift(value, value) == ()
    assert drift(copy.deepcopy(value), value) == ()


@given(objects, objects)
def test_what_a_dry_run_answered_is_never_an_addition(wanted, answer):
    both = {**wanted, "more": answer["spec"]}
    assert drift(both, wanted, [both]) == ()


@given(objects, st.data())
def test_an_added_key_is_found_wherever_it_is(wanted, data):
    found = copy.deepcopy(wanted)
    node = data.draw(st.sampled_from(maps(found)))
    node["theirs"] = "1"
    assert drift(found, wanted) != ()


def maps(value):
    """Every map in a value that is compared exactly."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    found = [one for item in inner for one in maps(item)]
    return [value, *found] if isinstance(value, dict) else found
