"""Hardware from a file."""

import pytest

from vlm_cli.simulator.hardware import Curve, Hardware, HardwareError, NodeType, read_hardware
from vlm_operator.names import Role


def test_what_is_left_out_is_the_simulator_s_own():
    assert read_hardware({}) == Hardware()


def test_curves_numbers_and_node_types_are_read():
    hardware = read_hardware(
        {
            "encode": {"fixed": 0.1, "linear": 1e-4},
            "kv_tokens": 5000,
            "node_types": {"encoder": {"small": {"nodes": 2, "startup_seconds": 9}}},
        }
    )
    assert hardware.encode == Curve(0.1, 1e-4)
    assert hardware.prefill == Hardware().prefill
    assert hardware.kv_tokens == 5000
    assert hardware.node_type(Role.ENCODER, "small") == NodeType(nodes=2, startup_seconds=9)
    assert hardware.node_type(Role.DECODE, "small") == NodeType()


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ([], "the hardware must be a mapping"),
        ({"kv": 1}, "kv is not a field: use one of"),
        ({"kv_tokens": "many"}, "kv_tokens must be a number of at least 0"),
        ({"kv_tokens": 1.5}, "kv_tokens must be an integer"),
        ({"kv_tokens": 0}, "kv_tokens must be greater than 0"),
        ({"encode": {"linear": 1}}, "encode.fixed is missing"),
        ({"encode": {"fixed": -1, "linear": 1}}, "encode.fixed must be a number of at least 0"),
        ({"node_types": {"gateway": {}}}, "node_types.gateway is not a role"),
        ({"node_types": {"decode": {"a": {"pods": 1}}}}, "node_types.decode.a.pods is not a field"),
    ],
)
def test_a_wrong_field_is_named_with_the_fix(value, words):
    with pytest.raises(HardwareError) as caught:
        read_hardware(value)
    assert words in str(caught.value)
