"""A plant from a file."""

import pytest

from vlm_operator.names import Role
from vlm_operator.simulate.plant import Curve, NodeType, Plant
from vlm_operator.simulate.settings import PlantError, read_plant


def test_what_is_left_out_is_the_simulator_s_own():
    assert read_plant({}) == Plant()


def test_curves_numbers_and_node_types_are_read():
    plant = read_plant(
        {
            "encode": {"fixed": 0.1, "linear": 1e-4},
            "kv_tokens": 5000,
            "node_types": {"encoder": {"small": {"nodes": 2, "startup_seconds": 9}}},
        }
    )
    assert plant.encode == Curve(0.1, 1e-4)
    assert plant.prefill == Plant().prefill
    assert plant.kv_tokens == 5000
    assert plant.node_type(Role.ENCODER, "small") == NodeType(nodes=2, startup_seconds=9)
    assert plant.node_type(Role.DECODE, "small") == NodeType()


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ([], "the plant must be a mapping"),
        ({"kv": 1}, "kv is no field: there are"),
        ({"kv_tokens": "many"}, "kv_tokens must be a number, 0 or more"),
        ({"kv_tokens": 1.5}, "kv_tokens must be a whole number"),
        ({"kv_tokens": 0}, "kv_tokens must be more than 0"),
        ({"encode": {"linear": 1}}, "encode.fixed is missing"),
        ({"encode": {"fixed": -1, "linear": 1}}, "encode.fixed must be a number, 0 or more"),
        ({"node_types": {"gateway": {}}}, "node_types.gateway is no role"),
        ({"node_types": {"decode": {"a": {"pods": 1}}}}, "node_types.decode.a.pods is no field"),
    ],
)
def test_a_wrong_field_is_named_with_the_fix(value, words):
    with pytest.raises(PlantError) as caught:
        read_plant(value)
    assert words in str(caught.value)
