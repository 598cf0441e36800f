"""All decoder layers in one call give, to the last bit, what their kernels give one by one."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernels.batches import NUM_LAYERS, Batch, make_batch
from kernels.guards import GUARD, bf16

from vlm_kernels import Activation, AttentionPlan, plan_attention
from vlm_kernels.decoder_layers import DecoderLayers, LayerKind
from vlm_kernels.int4_groups import GROUP
from vlm_kernels.kv_rows import GROUPED, NATIVE_TYPES, block_size_of
from vlm_kernels.layer_weights import Heads, LayerWeights, Linear, Norm, Tail
from vlm_kernels.layers_reference import decoder_layers_reference, logits_reference
from vlm_kernels.mixed_blocks import num_parts, split_entries
from vlm_kernels.native_layers import has_layers
from vlm_kernels.packed_weights import InputScale, mix_biases, pack, pack_gated

pytestmark = pytest.mark.skipif(not has_layers(), reason="this CPU has no AVX512-BF16")

LENGTHS = st.lists(
    st.tuples(st.integers(0, 20), st.sampled_from([1, 1, 1, 2, 7, 33])), min_size=1, max_size=5
)


@dataclasses.dataclass(frozen=True)
class Form:
    """What layers are like."""

    width: int = 32
    inner: int = 48
    groups: int = 2
    has_bias: bool = True
    has_more_norms: bool = False
    int8: bool = False
    is_calibrated: bool = False
    kv_dtype: torch.dtype = torch.bfloat16
    window: int | None = None
    has_float_tables: bool = False

    @property
    def heads(self) -> Heads:
        return Heads(2 * self.groups, 2, 16)


FORMS = st.builds(
    Form,
    width=st.sampled_from([16, 32, 70]),
    inner=st.sampled_from([16, 48, 64, 90]),
    groups=st.integers(1, 3),
    has_bias=st.booleans(),
    has_more_norms=st.booleans(),
    int8=st.booleans(),
    is_calibrated=st.booleans(),
    kv_dtype=st.sampled_from([kind for kind in NATIVE_TYPES if kind not in GROUPED]),
    window=st.sampled_from([None, 3]),
    has_float_tables=st.booleans(),
)


class Step:
    """A packed step of layers of one form; the second layer is of a kind of its own."""

    def __init__(self, form: Form, lengths: list[tuple[int, int]]) -> None:
        torch.manual_seed(len(lengths) + form.width)
        self.form = form
        self.batch = make_batch(
            lengths, num_groups=form.groups, dtype=torch.bfloat16, kv_dtype=form.kv_dtype
        )
        self.layers = [_layer(form, kind) for kind in range(NUM_LAYERS)]
        num_tokens = int(self.batch.query_start[-1])
        self.x = bf16(num_tokens, form.width)
        self.slots = _slots(self.batch, block_size_of(self.batch.kv_cache, form.heads.head_dim))
        tables = torch.float32 if form.has_float_tables else torch.bfloat16
        self._tables = torch.randn(NUM_LAYERS, 2, num_tokens, form.heads.head_dim).to(tables)

    def kinds(self, kv_cache: torch.Tensor) -> list[LayerKind]:
        windows = (None, self.form.window)
        return [
            LayerKind(cos, sin, _plan(self.batch, kv_cache, window))
            for (cos, sin), window in zip(self._tables, windows, strict=True)
        ]

    def together(self, num_threads: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
        """Hidden states and the cache."""
        x, cache = self.x.clone(), self.batch.kv_cache.clone()
        torch.set_num_threads(num_threads)
        DecoderLayers(self.layers, self.form.heads)(x, cache, self.slots, self.kinds(cache))
        return x, cache

    def one_by_one(self) -> tuple[torch.Tensor, torch.Tensor]:
        cache = self.batch.kv_cache.clone()
        heads, kinds = self.form.heads, self.kinds(cache)
        x = decoder_layers_reference(self.layers, heads, self.x, cache, self.slots, kinds)
        return x, cache


@given(FORMS, LENGTHS, st.integers(1, 3))
@settings(max_examples=60)
def test_together_is_one_by_one_to_the_last_bit(
    form: Form, lengths: list[tuple[int, int]], num_threads: int
) -> None:
    step = Step(form, lengths)
    (x, cache), (want, want_cache) = step.together(num_threads), step.one_by_one()
    assert x.isfinite().all()
    assert torch.equal(x, want)
    assert torch.equal(cache.view(torch.uint8), want_cache.view(torch.uint8))


@pytest.mark.parametrize("kv_dtype", list(GROUPED), ids=str)
def test_blocks_in_4_bits_are_written_from_rows_that_are_all_rotated(kv_dtype: torch.dtype) -> None:
    num_checked = 0
    for num_tokens in range(40, 300, 8):
        step = Step(Form(kv_dtype=kv_dtype), [(0, num_tokens)])
        entries = step.batch.block_table[0, : num_tokens * 2 * kv_dtype.itemsize // GROUP]
        parts = num_parts(step.batch.kv_cache)
        is_narrow = split_entries(entries, parts)[2]
        if not is_narrow.any() or is_narrow.sum() % parts:
            continue  # it would end inside a block
        num_checked += 1
        (x, cache), (want, want_cache) = step.together(3), step.one_by_one()
        assert torch.equal(x, want)
        assert torch.equal(cache.view(torch.uint8), want_cache.view(torch.uint8))
    assert num_checked > 3


def test_a_step_twice_gives_the_same() -> None:
    """What one step leaves in memory is nothing to the next, however large it was."""
    small, large = Step(Form(), [(3, 1)]), Step(Form(width=70, inner=90, int8=True), [(9, 7)] * 5)
    first, _ = small.together(2)
    large.together(2)
    assert torch.equal(first, small.together(2)[0])


def test_a_token_is_computed_alike_beside_any_others() -> None:
    form = Form(int8=True, has_more_norms=True)
    some, others = Step(form, [(5, 1)] * 3), Step(form, [(5, 1)] * 3)
    torch.manual_seed(1)
    others.x[1:] = bf16(2, form.width)
    (want, _), (got, _) = some.together(2), others.together(2)
    assert torch.equal(got[0], want[0])
    assert not torch.equal(got[1:], want[1:]), "the others took effect"


@given(FORMS, LENGTHS, st.integers(1, 3), st.data())
@settings(max_examples=30)
def test_logits_are_those_of_the_norm_and_the_head_behind(
    form: Form, lengths: list[tuple[int, int]], num_threads: int, data: st.DataObject
) -> None:
    step = Step(form, lengths)
    chosen = data.draw(st.sets(st.integers(0, len(step.x) - 1)).map(sorted))
    rows = torch.tensor(chosen, dtype=torch.int64)
    tail = Tail(_norm(form.width, adds_one=form.has_more_norms), _linear(form, 37, form.width))
    hidden, cache = step.together(num_threads)
    layers, of_logits = DecoderLayers(step.layers, form.heads, tail), step.batch.kv_cache.clone()
    logits = layers.logits(step.x.clone(), of_logits, step.slots, step.kinds(of_logits), rows)
    assert torch.equal(logits, logits_reference(tail, hidden, rows))
    assert torch.equal(of_logits.view(torch.uint8), cache.view(torch.uint8))


def test_logits_of_what_is_no_token_are_refused() -> None:
    step = Step(Form(), [(3, 1), (2, 2)])
    tail = Tail(_norm(32, adds_one=False), _linear(Form(), 37, 32))
    layers, cache = DecoderLayers(step.layers, step.form.heads, tail), step.batch.kv_cache
    for rows, message in (([3], "a row"), ([-1], "a row"), ([0, 1, 1, 2], "4 rows of 3 tokens")):
        with pytest.raises(ValueError, match=message):
            layers.logits(step.x, cache, step.slots, step.kinds(cache), torch.tensor(rows))
    gated = dataclasses.replace(tail, head=step.layers[0].up)
    with pytest.raises(ValueError, match="the head is gated"):
        DecoderLayers(step.layers, step.form.heads, gated)


def test_nothing_is_written_beside_the_tokens() -> None:
    step = Step(Form(), [(3, 1), (0, 5)])
    size = step.x.numel()
    field = torch.full((size + 2 * GUARD,), float("nan"), dtype=torch.bfloat16)
    inside = field[GUARD : GUARD + size].view(step.x.shape)
    inside.copy_(step.x)
    cache = step.batch.kv_cache
    DecoderLayers(step.layers, step.form.heads)(inside, cache, step.slots, step.kinds(cache))
    assert inside.isfinite().all()
    assert field[:GUARD].isnan().all()
    assert field[-GUARD:].isnan().all()


def test_bad_weights_are_refused_by_name() -> None:
    layer = _layer(Form(), 0)
    for change, message in (
        ({"qkv": layer.o}, "qkv must be"),
        ({"up": layer.down}, "plain weights are not followed by"),
        ({"activation": Activation.QUICK_GELU}, "gated weights are not followed by"),
        ({"kind": -1}, "kind -1"),
        ({"q_norm": layer.mlp_norm}, "come together"),
        ({"mlp_norm": Norm(torch.ones(31, dtype=torch.bfloat16), 1e-6)}, "mlp_norm is"),
        ({"o": dataclasses.replace(layer.o, bias=torch.ones(32))}, "the bias of o is"),
    ):
        with pytest.raises(ValueError, match=message):
            DecoderLayers([dataclasses.replace(layer, **change)], Form().heads)


def test_a_bad_step_is_refused_before_anything_is_written() -> None:
    step = Step(Form(), [(3, 1), (2, 2)])
    layers, cache = DecoderLayers(step.layers, step.form.heads), step.batch.kv_cache
    before, kinds = cache.clone(), step.kinds(step.batch.kv_cache)
    narrow = [dataclasses.replace(kind, cos=kind.cos[:, :-2]) for kind in kinds]
    shorter = [LayerKind(kind.cos[:-1], kind.sin[:-1], kind.plan) for kind in kinds]
    fewer = _plan(step.batch.alone(0), cache, None)
    torch_plan = _plan(step.batch, cache, None, use_native=False)
    for x, slots, given_kinds, message in (
        (step.x.float(), step.slots, kinds, "x is torch.float32"),
        (step.x.T.contiguous().T, step.slots, kinds, "x is"),
        (step.x[:-1], step.slots[:-1], shorter, "2 tokens, the plan has 3"),
        (step.x, step.slots + 10_000, kinds, "a slot is not in"),
        (step.x, step.slots[:-1], kinds, "slots"),
        (step.x, step.slots, kinds[:1], "kinds"),
        (step.x, step.slots, narrow, "cos or sin"),
        (step.x, step.slots, step.kinds(cache.clone()), "another cache"),
        (step.x, step.slots, [_with(kind, fewer) for kind in kinds], "3 tokens, the plan has 1"),
        (step.x, step.slots, [_with(kind, torch_plan) for kind in kinds], "for torch"),
    ):
        with pytest.raises(ValueError, match=message):
            layers(x, cache, slots, given_kinds)
    assert torch.equal(cache.view(torch.uint8), before.view(torch.uint8))


def _with(kind: LayerKind, plan: AttentionPlan) -> LayerKind:
    return dataclasses.replace(kind, plan=plan)


def _layer(form: Form, kind: int) -> LayerWeights:
    heads, width, inner = form.heads, form.width, form.inner
    queries = heads.num_heads * heads.head_dim
    joint = queries + 2 * heads.num_kv_heads * heads.head_dim
    gates = mix_biases(bf16(inner), bf16(inner))
    more = {}
    if form.has_more_norms:
        sizes = {"q_norm": 16, "k_norm": 16, "o_norm": width, "down_norm": width}
        more = {name: _norm(size, adds_one=True) for name, size in sizes.items()}
    return LayerWeights(
        attention_norm=_norm(width, adds_one=form.has_more_norms),
        qkv=_linear(form, joint, width),
        o=_linear(form, width, queries),
        mlp_norm=_norm(width, adds_one=form.has_more_norms),
        up=Linear(
            pack_gated(bf16(inner, width), bf16(inner, width), int8=form.int8),
            gates if form.has_bias else None,
        ),
        down=_linear(form, width, inner),
        scale=0.25,
        kind=kind,
        activation=Activation.GELU if form.has_more_norms else Activation.SILU,
        **more,
    )


def _linear(form: Form, num_outputs: int, num_inputs: int) -> Linear:
    weights = pack(bf16(num_outputs, num_inputs) / num_inputs**0.5, int8=form.int8)
    if form.int8 and form.is_calibrated:
        weights = weights.calibrated(InputScale(0.02, num_inputs))
    return Linear(weights, bf16(num_outputs) if form.has_bias else None)


def _norm(size: int, *, adds_one: bool) -> Norm:
    return Norm(bf16(size), 1e-6, adds_one)


def _slots(batch: Batch, block_size: int) -> torch.Tensor:
    slots = []
    for s, context in enumerate(batch.context_lens.tolist()):
        num_new = int(batch.query_start[s + 1] - batch.query_start[s])
        for position in range(context, context + num_new):
            block = int(batch.block_table[s, position // block_size])
            slots.append(block * block_size + position % block_size)
    return torch.tensor(slots)


def _plan(
    batch: Batch, kv_cache: torch.Tensor, window: int | None, *, use_native: bool = True
) -> AttentionPlan:
    return plan_attention(
        batch.query_start, batch.context_lens, batch.block_table, kv_cache,
        head_dim=batch.q.shape[-1], dtype=torch.bfloat16, window=window, use_native=use_native,
    )  # fmt: skip
