"""Sampling draws what its definition draws, from bfloat16 and float32, whatever a row asks for."""

from __future__ import annotations

import dataclasses
import importlib

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernels.guards import GUARD, among_nan
from kernels.variants import each_variant

from vlm_kernels import sample_tokens
from vlm_kernels.sampling import NOT_FINITE, Sampled, sample_reference, uniform

module = importlib.import_module("vlm_kernels.sampling")
variant = each_variant(module)

DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])


@dataclasses.dataclass(frozen=True)
class Edits:
    frequency_penalty: float
    presence_penalty: float
    repetition_penalty: float
    bias_ids: np.ndarray
    bias_values: np.ndarray

    @property
    def penalties(self) -> dict[str, float]:
        names = ("frequency_penalty", "presence_penalty", "repetition_penalty")
        return {name: getattr(self, name) for name in names}


@dataclasses.dataclass(frozen=True)
class Edited:
    row: int
    edits: Edits
    token_ids: np.ndarray
    num_prompt: int


@dataclasses.dataclass(frozen=True)
class Masks:
    rows: np.ndarray
    of_sets: np.ndarray

    def words(self) -> np.ndarray:
        return self.of_sets


def masks_of(sets: list[set[int] | None], vocabulary: int) -> Masks:
    """The masks of rows; None may get any token."""
    rows, bits = np.full(len(sets), -1, np.int32), []
    for row, tokens in enumerate(sets):
        if tokens is not None:
            rows[row] = len(bits)
            allowed = np.zeros(-(-vocabulary // 32) * 32, np.bool_)
            allowed[list(tokens)] = True
            bits.append(allowed)
    packed = np.packbits(np.array(bits, np.bool_).reshape(len(bits), -1), 1, bitorder="little")
    return Masks(rows, np.ascontiguousarray(packed).view(np.uint32))


@dataclasses.dataclass(frozen=True)
class Params:
    """Greedy rows by default."""

    temperature: np.ndarray
    top_p: np.ndarray
    top_k: np.ndarray
    min_p: np.ndarray
    seed: np.ndarray
    index: np.ndarray
    num_logprobs: np.ndarray | None = None
    edited: tuple[Edited, ...] = ()
    masks: Masks | None = None

    @property
    def greedy(self) -> bool:
        return not self.temperature.any()

    @property
    def columns(self) -> dict[str, np.ndarray]:
        names = ("temperature", "top_p", "top_k", "min_p", "seed")
        return {name: getattr(self, name) for name in names}


def params(num_rows: int, temperature: float = 0.0, **others: float) -> Params:
    """The same for every row, but for its seed."""
    ones = np.ones(num_rows, np.float32)
    return Params(
        temperature=ones * np.float32(temperature),
        top_p=ones * np.float32(others.get("top_p", 1)),
        top_k=(ones * others.get("top_k", 0)).astype(np.int32),
        min_p=ones * np.float32(others.get("min_p", 0)),
        seed=np.arange(num_rows, dtype=np.uint64),
        index=np.arange(num_rows, dtype=np.int64) * 7,
        num_logprobs=np.full(num_rows, others["logprobs"]) if "logprobs" in others else None,
    )


def any_params(rng: np.random.Generator, num_rows: int, vocabulary: int) -> Params:
    """Every row asks for something else."""

    def each(*choices: float) -> np.ndarray:
        return rng.choice(np.array(choices, np.float32), num_rows)

    def edits(row: int) -> Edited:
        bias_ids = rng.permutation(vocabulary + 3)[: rng.integers(4)]
        return Edited(
            row,
            Edits(
                *(float(rng.choice([0, 0.5, -2])) for _ in range(2)),
                float(rng.choice([1, 0.7, 1.3])),
                bias_ids,
                rng.choice([-100, 1.5, 100], len(bias_ids)).astype(np.float32),
            ),
            rng.integers(-1, min(vocabulary, 20) + 3, rng.integers(9), np.int32),
            0,
        )

    def mask() -> set[int] | None:
        """Any tokens, some of them, one or none."""
        size = int(rng.choice([0, 1, 2, vocabulary // 2, vocabulary]))
        return set(rng.permutation(vocabulary)[:size].tolist()) if rng.random() < 0.6 else None

    masks = [mask() for _ in range(num_rows)]
    chosen = [edits(row) for row in range(num_rows) if rng.random() < 0.5]
    return Params(
        masks=masks_of(masks, vocabulary) if any(one is not None for one in masks) else None,
        temperature=each(0, 1e-30, 0.3, 1, 2.5),
        top_p=each(0, 0.1, 0.9, 0.999, 1),
        top_k=each(0, 1, 7, 100, 5000).astype(np.int32),
        min_p=each(0, 0, 0.2, 1),
        seed=rng.integers(0, 2**64, num_rows, np.uint64),
        index=rng.integers(0, 4096, num_rows),
        num_logprobs=each(-1, 0, 3, 20).astype(np.int64) if rng.random() < 0.5 else None,
        edited=tuple(
            dataclasses.replace(one, num_prompt=int(rng.integers(len(one.token_ids) + 1)))
            for one in chosen
        ),
    )


def assert_same(got: Sampled, want: Sampled) -> None:
    np.testing.assert_array_equal(got.token_ids, want.token_ids)
    if want.logprobs is None:
        assert got.logprobs is None
        return
    np.testing.assert_allclose(got.logprobs, want.logprobs, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(got.top_ids, want.top_ids)
    np.testing.assert_allclose(got.top_logprobs, want.top_logprobs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("temperature", [0, 1.5])
@pytest.mark.parametrize("logprobs", [None, 3])
def test_a_masked_row_gets_a_token_of_its_mask_and_keeps_its_log_probabilities(
    temperature: float, logprobs: int | None
) -> None:
    rng = np.random.default_rng(3)
    logits = torch.from_numpy(rng.standard_normal((4, 300), np.float32) * 3)
    asked = params(4, temperature, **({} if logprobs is None else {"logprobs": logprobs}))
    sets = [{7}, None, {4, 250, 299}, set()]
    masked = dataclasses.replace(asked, masks=masks_of(sets, 300))
    free, got = sample_tokens(logits, asked), sample_tokens(logits, masked)
    assert got.token_ids[0] == 7
    assert got.token_ids[1] == free.token_ids[1]
    assert got.token_ids[2] in {4, 250, 299}
    assert got.token_ids[3] == NOT_FINITE, "no token is allowed"
    if logprobs is not None:
        model = torch.log_softmax(logits, dim=-1)
        chosen = [model[row, got.token_ids[row]] for row in range(3)]
        np.testing.assert_allclose(got.logprobs[:3], chosen, rtol=1e-5, atol=1e-5)
        np.testing.assert_array_equal(got.top_ids[:3], free.top_ids[:3])


def test_a_mask_of_all_tokens_changes_nothing() -> None:
    rng = np.random.default_rng(5)
    logits = torch.from_numpy(rng.standard_normal((6, 333), np.float32))
    asked = dataclasses.replace(any_params(rng, 6, 333), masks=None)
    masked = dataclasses.replace(asked, masks=masks_of([set(range(333))] * 6, 333))
    assert_same(sample_tokens(logits, masked), sample_tokens(logits, asked))


@given(
    st.integers(0, 9), st.integers(1, 3000), DTYPES, st.sampled_from([0.01, 3, 30]), st.integers(0)
)
@settings(max_examples=100)
def test_it_is_its_definition_on_any_rows(
    num_rows: int, vocabulary: int, dtype: torch.dtype, spread: float, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    values = (rng.standard_normal((num_rows, vocabulary), np.float32) * spread).round(2)
    logits = among_nan(torch.from_numpy(values).to(dtype))
    asked = any_params(rng, num_rows, vocabulary)
    assert_same(sample_tokens(logits, asked), sample_reference(logits, asked))


@pytest.mark.parametrize("asked", [{}, {"top_p": 0.9}, {"top_k": 9000, "top_p": 0.99}])
@pytest.mark.parametrize("spread", [0.001, 4.0])
def test_a_vocabulary_of_a_model_is_drawn_from_alike(
    asked: dict[str, float], spread: float
) -> None:
    torch.manual_seed(0)
    logits = torch.randn(8, 32_003) * spread
    for_all = params(8, temperature=0.8, **asked)
    assert_same(sample_tokens(logits, for_all), sample_reference(logits, for_all))


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**40))
@settings(max_examples=50)
def test_random_numbers_are_those_of_the_definition(seed: int, index: int) -> None:
    asked = dataclasses.replace(
        params(1, temperature=1), seed=np.array([seed], np.uint64), index=np.array([index])
    )
    even = sample_tokens(torch.zeros(1, 4096), asked)
    assert even.token_ids[0] == int(uniform(asked.seed, asked.index)[0] * 4096)


def test_a_row_is_the_same_among_others_as_alone_and_in_any_number_of_threads() -> None:
    torch.manual_seed(0)
    logits = torch.randn(40, 2000) * 3
    asked = params(40, temperature=0.9, top_p=0.95, logprobs=3)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        together = sample_tokens(logits, asked)
    finally:
        torch.set_num_threads(threads)
    for i in (0, 7, 8, 39):
        one = dataclasses.replace(
            params(1, temperature=0.9, top_p=0.95, logprobs=3),
            seed=asked.seed[i : i + 1],
            index=asked.index[i : i + 1],
        )
        alone = sample_tokens(logits[i : i + 1], one)
        for all_rows, row in zip(together, alone, strict=True):
            assert all_rows is not None
            np.testing.assert_array_equal(all_rows[i], row[0])


def test_of_equal_tokens_the_first_is_taken_and_said_first() -> None:
    logits = torch.zeros(2, 777)
    logits[1, [5, 300, 776]] = 1
    said = sample_tokens(logits.bfloat16(), params(2, logprobs=4))
    assert said.token_ids.tolist() == [0, 5]
    assert said.top_ids is not None
    assert said.top_ids.tolist() == [[0, 1, 2, 3], [5, 300, 776, 0]]


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("place", [0, 511, 699])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_that_is_not_finite_has_no_token_and_spoils_no_other(
    poison: float, place: int, temperature: float
) -> None:
    torch.manual_seed(0)
    logits, asked = torch.randn(3, 700), params(3, temperature=temperature, logprobs=2)
    clean = sample_tokens(logits, asked)
    logits[1, place] = poison
    got = sample_tokens(logits, asked)
    assert got.token_ids.tolist() == [clean.token_ids[0], NOT_FINITE, clean.token_ids[2]]
    assert got.logprobs is not None
    assert got.top_logprobs is not None
    assert np.isnan([got.logprobs[1], *got.top_logprobs[1]]).all()
    assert np.isfinite(got.top_logprobs[[0, 2]]).all()


def test_a_row_whose_edits_overflow_has_no_token() -> None:
    logits = torch.zeros(1, 50)
    logits[0, 4] = 3e38
    edits = Edits(0, 0, 1e-3, np.zeros(0, np.int64), np.zeros(0, np.float32))
    asked = dataclasses.replace(
        params(1, temperature=1), edited=(Edited(0, edits, np.array([4], np.int32), 1),)
    )
    assert sample_tokens(logits, params(1, temperature=1)).token_ids[0] == 4
    assert sample_tokens(logits, asked).token_ids[0] == NOT_FINITE


def test_every_output_is_written_and_nothing_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    logits, asked = torch.randn(5, 333), params(5, temperature=1, logprobs=4)
    want = sample_tokens(logits, asked)
    fields: list[np.ndarray] = []

    def poisoned(like: np.ndarray) -> np.ndarray:
        poison = np.nan if like.dtype == np.float32 else -77
        fields.append(np.full(like.size + 2 * GUARD, poison, like.dtype))
        return fields[-1][GUARD:-GUARD].reshape(like.shape)

    made = Sampled(*(poisoned(array) for array in want if array is not None))
    monkeypatch.setattr(module, "_results", lambda *_: made)
    assert_same(sample_tokens(logits, asked), want)
    for field in fields:
        for guard in (field[:GUARD], field[-GUARD:]):
            assert (np.isnan(guard) if field.dtype == np.float32 else guard == -77).all()


def edit_of(row: int, num_prompt: int, num_biases: int = 0) -> tuple[Edited, ...]:
    edits = Edits(0, 0, 2, np.arange(num_biases), np.zeros(0, np.float32))
    return (Edited(row, edits, np.zeros(3, np.int32), num_prompt),)


@pytest.mark.parametrize(
    ("logits", "asked", "named"),
    [
        (torch.zeros(8), params(1), r"\(8,\)"),
        (torch.zeros(2, 8, dtype=torch.float64), params(2), "float64"),
        (torch.zeros(2, 0), params(2), "rows of 0 logits"),
        (torch.zeros(1, 1).expand(2, (1 << 19) + 1), params(2), "rows of 524289 logits"),
        (torch.zeros(8, 2).T, params(2), "stride 2"),
        (torch.zeros(2, 8), params(3), "temperature"),
        (torch.zeros(2, 8), params(2, temperature=float("nan")), "temperature"),
        (torch.zeros(2, 8), params(2, temperature=1, top_p=float("nan")), "top_p"),
        (torch.zeros(2, 8), params(2, temperature=1, top_k=-1), "top_k"),
        (torch.zeros(2, 8), params(2, temperature=float("inf")), "temperature"),
        (torch.zeros(2, 8), params(2, temperature=1, min_p=-0.5), "min_p"),
        (torch.zeros(2, 8), params(2, temperature=1, min_p=1.5), "min_p"),
        (torch.zeros(2, 8), dataclasses.replace(params(2), edited=edit_of(2, 0)), "row 2 of 2"),
        (torch.zeros(2, 8), dataclasses.replace(params(2), edited=edit_of(1, 4)), "prompt of 4"),
        (torch.zeros(2, 8), dataclasses.replace(params(2), edited=edit_of(0, 0, 2)), "2 tokens"),
        (torch.zeros(2, 40), dataclasses.replace(params(2), masks=masks_of([{1}] * 2, 8)), "masks"),
        (torch.zeros(2, 8), dataclasses.replace(params(2), masks=masks_of([{1}], 8)), "masks"),
    ],
)
def test_what_does_not_fit_raises(logits: torch.Tensor, asked: Params, named: str) -> None:
    with pytest.raises(ValueError, match=f"sample_tokens.*{named}"):
        sample_tokens(logits, asked)
