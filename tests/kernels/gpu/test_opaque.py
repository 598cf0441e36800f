"""An operation keeps what it declares to torch's compiler, at any address of its outputs.

Outputs are between guards here (`conftest.guards`), so none begins at the start of its memory.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from vlm_kernels import quantise_weights, quantised_linear, rope

FAST = ("test_schema", "test_faketensor")


def calls(device: torch.device) -> dict[str, tuple[tuple[Any, ...], dict[str, Any]]]:
    """Arguments of every operation: 6 rows of 32, heads of 16."""
    torch.manual_seed(0)
    x, w = torch.randn(6, 32, device=device), torch.randn(32, device=device)
    q, k, v = torch.randn(6, 3, 2, 16, device=device).unbind(1)
    cos, sin = torch.randn(2, 6, 16, device=device)
    rounded = {
        kind: quantise_weights(torch.randn(8, 32, device=device), group=group)
        for kind, group in (("int8", None), ("int4", 32))
    }
    return {
        "rms_norm": ((x, w), {"eps": 1e-6}),
        "layer_norm": ((x, w, w), {"eps": 1e-6}),
        "silu_mul": (x.chunk(2, dim=1), {}),
        "rope": ((q, cos, sin), {}),
        "varlen_attention": (
            (q, k, v, torch.tensor([0, 2, 6], dtype=torch.int32, device=device)),
            {"scale": 0.3},
        ),
        **{
            f"quantised_linear {kind}": ((x, made.codes, made.scales, made.group, w[:8]), {})
            for kind, made in rounded.items()
        },
    }


NAMES = tuple(calls(torch.device("cpu")))


def test_every_operation_has_arguments_here() -> None:
    named = {
        name.partition("::")[2]
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("triptych::")
    }
    assert named == {name.partition(" ")[0] for name in NAMES}


@pytest.mark.parametrize("name", NAMES)
def test_an_operation_is_what_its_schema_and_its_shape_say(name: str, device: torch.device) -> None:
    args, kwargs = calls(device)[name]
    operation = getattr(torch.ops.triptych, name.partition(" ")[0]).default
    torch.library.opcheck(operation, args, kwargs, test_utils=FAST)
    found = operation(*args, **kwargs)
    if found is not None:
        assert found.is_contiguous()
        assert found.storage_offset() == 0, "views of it would be views of other elements"


def test_what_is_written_into_views_of_an_operations_answer_is_found_there(
    device: torch.device,
) -> None:
    torch.manual_seed(0)
    weights = quantise_weights(torch.randn(96, 32, device=device))
    x, (cos, sin) = torch.randn(6, 32, device=device), torch.randn(2, 6, 16, device=device)

    def turned(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        heads = quantised_linear(x, weights).view(6, 3, 2, 16)
        for of_kind in heads.unbind(1)[:2]:
            rope(of_kind, cos, sin)
        return tuple(heads.unbind(1))

    torch.compiler.reset()
    got = torch.compile(turned, fullgraph=True, backend="aot_eager")(x)
    for one, exact in zip(got, turned(x), strict=True):
        torch.testing.assert_close(one, exact)
