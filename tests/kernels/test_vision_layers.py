"""Vision layers in one call give, to the last bit, what its kernels give one by one."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernels.guards import GUARD, assert_guards_stand, bf16

from vlm_kernels import Activation
from vlm_kernels.layer_weights import Heads, LayerNorm, LayerWeights, Linear, Norm
from vlm_kernels.layers_reference import vision_layer_reference
from vlm_kernels.native_layers import has_layers
from vlm_kernels.packed_weights import InputScale, mix_biases, pack, pack_gated
from vlm_kernels.segments import Segments, whole_segments
from vlm_kernels.vision_layers import VisionLayers

pytestmark = pytest.mark.skipif(not has_layers(), reason="this CPU has no AVX512-BF16")


@dataclasses.dataclass(frozen=True)
class Form:
    """What a layer is like."""

    width: int = 32
    inner: int = 48
    num_heads: int = 2
    head_dim: int = 16
    is_gated: bool = False
    is_centred: bool = True
    has_bias: bool = True
    int8: bool = False
    is_calibrated: bool = False
    tables: torch.dtype | None = torch.float32

    @property
    def heads(self) -> Heads:
        return Heads(self.num_heads, self.num_heads, self.head_dim)


FORMS = st.builds(
    Form,
    width=st.sampled_from([16, 64, 70]),
    inner=st.sampled_from([16, 64, 90]),
    num_heads=st.integers(1, 3),
    head_dim=st.sampled_from([16, 40]),
    is_gated=st.booleans(),
    is_centred=st.booleans(),
    has_bias=st.booleans(),
    int8=st.booleans(),
    is_calibrated=st.booleans(),
    tables=st.sampled_from([None, torch.float32, torch.bfloat16]),
)
LENGTHS = st.lists(st.integers(0, 70), min_size=1, max_size=4).filter(any)


class Case:
    """A layer of one form, and patches in segments of these lengths."""

    def __init__(self, form: Form, lengths: list[int]) -> None:
        torch.manual_seed(sum(lengths) + form.width)
        self.form, self.weights = form, _weights(form)
        self.segments = whole_segments(np.array(lengths))
        self.x = bf16(sum(lengths), form.width)
        self.positions: tuple[torch.Tensor, torch.Tensor] | None = None
        if form.tables is not None:
            cos, sin = torch.randn(2, sum(lengths), form.head_dim).to(form.tables)
            self.positions = cos, sin

    def together(self, num_threads: int = 1) -> torch.Tensor:
        torch.set_num_threads(num_threads)
        x = self.x.clone()
        VisionLayers([self.weights], self.form.heads)(x, self.segments, self.positions)
        return x

    def one_by_one(self) -> torch.Tensor:
        given = self.x, self.segments, self.positions
        return vision_layer_reference(self.weights, self.form.heads, *given)


@given(FORMS, LENGTHS, st.integers(1, 3))
@settings(max_examples=60)
def test_together_is_one_by_one_to_the_last_bit(
    form: Form, lengths: list[int], num_threads: int
) -> None:
    case = Case(form, lengths)
    got = case.together(num_threads)
    assert got.isfinite().all()
    assert torch.equal(got, case.one_by_one())


@given(FORMS, LENGTHS, st.integers(1, 4))
@settings(max_examples=30)
def test_layers_in_one_call_are_the_layers_one_by_one(
    form: Form, lengths: list[int], num_layers: int
) -> None:
    case = Case(form, lengths)
    layers = [_weights(form) for _ in range(num_layers)]
    got, want = case.x.clone(), case.x
    VisionLayers(layers, form.heads)(got, case.segments, case.positions)
    for layer in layers:
        want = vision_layer_reference(layer, form.heads, want, case.segments, case.positions)
    assert torch.equal(got, want)


@pytest.mark.parametrize("number", [1, 2])
def test_layers_that_are_split_are_the_layers_in_one_call(number: int) -> None:
    case = Case(Form(), [40, 30])
    layers = VisionLayers([_weights(Form()) for _ in range(3)], Form().heads)
    whole, parts = case.x.clone(), case.x.clone()
    layers(whole, case.segments, case.positions)
    for part in layers.split(number):
        assert not torch.equal(parts, whole)
        part(parts, case.segments, case.positions)
    assert torch.equal(parts, whole)
    for empty in (0, 3):
        with pytest.raises(ValueError, match="no layer"):
            layers.split(empty)


def test_an_image_is_computed_alike_beside_any_other() -> None:
    both, other = Case(Form(), [40, 30]), Case(Form(), [40, 30])
    other.x[40:] = bf16(30, 32)
    assert torch.equal(both.together(2)[:40], other.together(2)[:40])
    assert not torch.equal(both.together(2)[40:], other.together(2)[40:]), "the other took effect"


def test_a_layer_after_a_larger_one_gives_the_same() -> None:
    """Earlier content of memory does not change the next result."""
    small, large = Case(Form(), [20]), Case(Form(width=70, inner=90, int8=True), [70] * 3)
    first = small.together(2)
    large.together(2)
    assert torch.equal(first, small.together(2))


def test_nothing_is_written_beside_the_patches() -> None:
    case = Case(Form(), [33])
    size = case.x.numel()
    field = torch.full((size + 2 * GUARD,), float("nan"), dtype=torch.bfloat16)
    inside = field[GUARD : GUARD + size].view(case.x.shape)
    inside.copy_(case.x)
    VisionLayers([case.weights], case.form.heads)(inside, case.segments, case.positions)
    assert torch.equal(inside, case.one_by_one())
    assert_guards_stand([field])


def test_bad_weights_are_refused_by_name() -> None:
    layer = _weights(Form())
    for change, message in (
        ({"qkv": layer.o}, "qkv must be"),
        ({"activation": Activation.SILU}, "plain weights are not followed by"),
        ({"kind": 1}, "kind 1"),
        ({"mlp_norm": LayerNorm(bf16(32), bf16(31), 1e-6)}, "the bias of mlp_norm is"),
        ({"mlp_norm": LayerNorm(bf16(31), bf16(32), 1e-6)}, "mlp_norm is"),
    ):
        with pytest.raises(ValueError, match=message):
            VisionLayers([layer, dataclasses.replace(layer, **change)], Form().heads)


def test_no_layers_are_refused() -> None:
    with pytest.raises(ValueError, match="no layer"):
        VisionLayers([], Form().heads)


def test_bad_patches_are_refused_before_anything_is_written() -> None:
    case = Case(Form(), [5, 3])
    layer, before = VisionLayers([case.weights], case.form.heads), case.x.clone()
    cos, sin = case.positions or ()
    blocks = dataclasses.replace(case.segments, block_table=np.zeros((2, 1), np.int32))
    beyond = dataclasses.replace(case.segments, key_start=np.array([0, 6]))
    for x, segments, positions, message in (
        (case.x.float(), case.segments, (cos, sin), "x is torch.float32"),
        (case.x.T.contiguous().T, case.segments, (cos, sin), "x is"),
        (case.x[:, :-2].contiguous(), case.segments, (cos, sin), "x is"),
        (case.x, _of(5, 2), (cos, sin), "8 patches, the segments have 7"),
        (case.x, _of(5, 4), (cos, sin), "8 patches, the segments have 9"),
        (case.x, blocks, (cos, sin), "block table"),
        (case.x, beyond, (cos, sin), "the segments have more keys"),
        (case.x, case.segments, (cos, sin[:, :-2]), "cos or sin"),
        (case.x, case.segments, (cos, sin.bfloat16()), "cos or sin"),
    ):
        with pytest.raises(ValueError, match=message):
            layer(x, segments, positions)
    assert torch.equal(case.x, before)


def _of(*lengths: int) -> Segments:
    return whole_segments(np.array(lengths))


def _weights(form: Form) -> LayerWeights:
    width, inner, joint = form.width, form.inner, form.num_heads * form.head_dim
    if form.is_gated:
        gates = mix_biases(bf16(inner), bf16(inner)) if form.has_bias else None
        both = (bf16(inner, width), bf16(inner, width))
        up = Linear(pack_gated(*both, int8=form.int8), gates)
    else:
        up = _linear(form, inner, width)
    return LayerWeights(
        attention_norm=_norm(form),
        qkv=_linear(form, 3 * joint, width),
        o=_linear(form, width, joint),
        mlp_norm=_norm(form),
        up=up,
        down=_linear(form, width, inner),
        scale=0.25,
        activation=Activation.SILU if form.is_gated else Activation.QUICK_GELU,
    )


def _linear(form: Form, num_outputs: int, num_inputs: int) -> Linear:
    weights = pack(bf16(num_outputs, num_inputs) / num_inputs**0.5, int8=form.int8)
    if form.int8 and form.is_calibrated:
        weights = weights.calibrated(InputScale(0.02, num_inputs))
    return Linear(weights, bf16(num_outputs) if form.has_bias else None)


def _norm(form: Form) -> Norm | LayerNorm:
    weight, bias = bf16(2, form.width)
    return LayerNorm(weight, bias, 1e-6) if form.is_centred else Norm(weight, 1e-6)
