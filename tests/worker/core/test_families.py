"""The family table against transformers, which defines what is right."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLModel
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import (
    Qwen2VLImageProcessorPil,
    smart_resize,
)

from vlm_worker.core.families import (
    FAMILIES,
    Family,
    ModelConfigError,
    load_family,
    parse_family,
)
from vlm_worker.errors import InvalidRequestError
from vlm_worker.types import ImageItem

MODEL = Path(__file__).parents[3] / "examples" / "shapes" / "model"
CONFIG = json.loads((MODEL / "config.json").read_text())
PROCESSOR = json.loads((MODEL / "preprocessor_config.json").read_text())


@pytest.fixture(scope="module")
def family() -> Family:
    return load_family(MODEL)


sides = st.one_of(
    st.integers(1, 9000), st.sampled_from([1, 2, 13, 14, 15, 27, 28, 29, 448, 471, 8192])
)


@settings(max_examples=500)
@given(height=sides, width=sides, max_pixels=st.sampled_from([0, 3136, 50176, 150000]))
def test_geometry_is_that_of_transformers(height: int, width: int, max_pixels: int) -> None:
    family = load_family(MODEL)
    if max(height, width) > 200 * min(height, width):
        with pytest.raises(InvalidRequestError, match="200 times"):
            family.geometry(height, width)
        return
    geometry = family.geometry(height, width, max_pixels=max_pixels)
    longest = max_pixels or family.processor.max_pixels
    assert (geometry.height, geometry.width) == smart_resize(height, width, 28, 3136, longest)
    processor = Qwen2VLImageProcessorPil.from_pretrained(MODEL)
    patches = processor.get_number_of_image_patches(height, width, {"max_pixels": longest})
    assert geometry.grid_thw == (1, geometry.height // 14, geometry.width // 14)
    assert np.prod(geometry.grid_thw) == patches == 4 * geometry.num_tokens


def test_boundaries_where_exact_roots_would_differ_follow_transformers(family: Family) -> None:
    for side in (19, 38, 471, 478, 485):
        geometry = family.geometry(side, side)
        assert (geometry.height, geometry.width) == smart_resize(side, side, 28, 3136, 200704)


def test_no_image_has_more_pixels_than_the_model_takes(family: Family) -> None:
    for height in range(1, 2000, 37):
        for width in range(1, 2000, 41):
            if max(height, width) <= 200 * min(height, width):
                geometry = family.geometry(height, width)
                assert 1 <= geometry.num_tokens <= 256


@st.composite
def prompts(draw: st.DrawFn) -> tuple[list[int], list[ImageItem]]:
    ids: list[int] = []
    items = []
    for _ in range(draw(st.integers(0, 4))):
        ids += [*draw(st.lists(st.integers(7, 700), max_size=6)), 3]
        t = draw(st.integers(1, 2))
        rows, columns = draw(st.integers(1, 9)), draw(st.integers(1, 9))
        count = t * rows * columns
        items.append(ImageItem(b"", len(ids), count, (t, 2 * rows, 2 * columns)))
        ids += [5] * count + [4]
    return ids + draw(st.lists(st.integers(7, 700), max_size=6)), items


def rope_index() -> Qwen2_5_VLModel:
    """The model's `get_rope_index` reads its configuration alone, so no module is built."""
    model = Qwen2_5_VLModel.__new__(Qwen2_5_VLModel)
    torch.nn.Module.__init__(model)
    model.config = Qwen2_5_VLConfig.from_pretrained(MODEL)
    return model


@settings(max_examples=200)
@given(prompt=prompts())
def test_positions_are_those_of_transformers(
    prompt: tuple[list[int], list[ImageItem]],
) -> None:
    ids, items = prompt
    if not ids:
        return
    positions, delta = load_family(MODEL).positions(ids, items)
    grids = torch.tensor([item.grid_thw for item in items]) if items else None
    wanted, wanted_delta = rope_index().get_rope_index(
        torch.tensor([ids]),
        torch.tensor([[1 if token == 5 else 0 for token in ids]]),
        image_grid_thw=grids,
    )
    np.testing.assert_array_equal(positions, wanted[:, 0].numpy())
    assert positions.dtype == np.int64
    assert delta == wanted_delta.item()


@settings(max_examples=100)
@given(prompt=prompts(), answer=st.lists(st.integers(7, 700), max_size=8))
def test_answer_positions_are_shifted_by_delta(
    prompt: tuple[list[int], list[ImageItem]], answer: list[int]
) -> None:
    ids, items = prompt
    family = load_family(MODEL)
    if any(item.grid_thw[0] > 1 for item in items):
        return  # only video frames reach further in time than in space
    before, delta = family.positions(ids, items)
    after, delta_after = family.positions(ids + answer, items)
    np.testing.assert_array_equal(after[:, : len(ids)], before)
    if ids:
        assert delta_after == delta
        wanted = np.arange(len(ids), len(ids) + len(answer)) + delta
        np.testing.assert_array_equal(
            after[:, len(ids) :], np.broadcast_to(wanted, (3, len(answer)))
        )


def test_an_empty_prompt_has_no_positions(family: Family) -> None:
    positions, delta = family.positions([], [])
    assert positions.shape == (3, 0)
    assert delta == 0


@pytest.mark.parametrize(
    ("items", "problem"),
    [
        pytest.param([ImageItem(b"", 1, 5, (1, 4, 4))], "has 4", id="count against grid"),
        pytest.param([ImageItem(b"", 1, 4, (1, 3, 4))], "no patch grid", id="odd grid"),
        pytest.param([ImageItem(b"", 1, 0, (0, 4, 4))], "no patch grid", id="empty grid"),
        pytest.param([ImageItem(b"", 3, 4, (1, 4, 4))], "free are", id="past the end"),
        pytest.param([ImageItem(b"", -1, 4, (1, 4, 4))], "free are", id="before the start"),
        pytest.param([ImageItem(b"", 0, 4, (1, 4, 4))], "not all image", id="on text"),
        pytest.param(
            [ImageItem(b"", 1, 4, (1, 4, 4)), ImageItem(b"", 2, 1, (1, 2, 2))],
            "free are",
            id="overlap",
        ),
    ],
)
def test_items_that_disagree_with_the_prompt_are_refused(
    family: Family, items: list[ImageItem], problem: str
) -> None:
    with pytest.raises(InvalidRequestError, match=problem):
        family.positions([3, 5, 5, 5, 5, 4], items)


@given(prompt=prompts(), excess=st.integers(0, 2**31 - 1 - 704), data=st.data())
def test_a_token_without_an_embedding_is_refused_at_any_position(
    prompt: tuple[list[int], list[ImageItem]], excess: int, data: st.DataObject
) -> None:
    """The table has rows for ids below 704; what lies beyond must not be read as another token."""
    ids, items = prompt
    index = data.draw(st.integers(0, len(ids)))
    while any(item.offset < index < item.end for item in items):
        index += 1
    moved = [
        dataclasses.replace(item, offset=item.offset + (item.offset >= index)) for item in items
    ]
    beyond = [*ids[:index], 704 + excess, *ids[index:]]
    with pytest.raises(InvalidRequestError, match=rf"token_ids\[{index}\] is {704 + excess};.*704"):
        load_family(MODEL).positions(beyond, moved)


def test_a_placeholder_beyond_the_table_is_taken_with_its_image_alone(family: Family) -> None:
    """LLaVA's <image> may be the first id that has no row."""
    beyond = dataclasses.replace(family, image_token_id=family.vocab_size)
    placeholders = [beyond.image_token_id] * 4
    beyond.positions([3, *placeholders, 4], [ImageItem(b"", 1, 4, (1, 4, 4))])
    with pytest.raises(InvalidRequestError, match=r"token_ids\[5\] is 704"):
        beyond.positions([3, *placeholders, 704], [ImageItem(b"", 1, 4, (1, 4, 4))])


def test_placeholders_expand_in_place(family: Family) -> None:
    ids, offsets = family.expand([9, 3, 5, 4, 10, 3, 5, 4], [2, 3])
    assert ids == [9, 3, 5, 5, 4, 10, 3, 5, 5, 5, 4]
    assert offsets == [2, 7]


def test_a_placeholder_too_many_is_refused(family: Family) -> None:
    with pytest.raises(InvalidRequestError, match="2 image placeholders for 1 images"):
        family.expand([5, 5], [4])


def test_a_million_placeholders_in_text_are_refused_in_linear_time(family: Family) -> None:
    with pytest.raises(InvalidRequestError, match="1000000 image placeholders"):
        family.expand([5] * 1_000_000, [4])


def test_detail_low_is_a_smaller_budget_and_the_others_are_the_models_own(family: Family) -> None:
    assert family.max_pixels_of("low") == 50176
    assert {family.max_pixels_of(d) for d in ("auto", "high", "original")} == {0}
    low = family.geometry(1000, 1000, max_pixels=family.max_pixels_of("low"))
    assert low.num_tokens == 64
    assert family.geometry(1000, 1000).num_tokens == 256
    big = parse_family(CONFIG, {**PROCESSOR, "size": {"longest_edge": 12845056}})
    assert big.max_pixels_of("low") == 512 * 512


def test_a_cap_above_the_models_own_maximum_changes_nothing(family: Family) -> None:
    assert family.geometry(4000, 3000, max_pixels=10**9) == family.geometry(4000, 3000)


def test_children_of_each_half_exist_in_the_model_class() -> None:
    spec = FAMILIES["qwen2_5_vl"]
    with torch.device("meta"):
        model = Qwen2_5_VLModel(Qwen2_5_VLConfig.from_pretrained(MODEL))
    assert {name for name, _ in model.named_children()} == {
        *spec.encoder_children,
        *spec.lm_children,
    }


def test_defaults_are_those_of_transformers() -> None:
    processor = parse_family(CONFIG, {"image_processor_type": "Qwen2VLImageProcessor"}).processor
    reference = Qwen2VLImageProcessorPil()
    assert processor.min_pixels == reference.size["shortest_edge"]
    assert processor.max_pixels == reference.size["longest_edge"]
    assert processor.image_mean == tuple(reference.image_mean)
    assert processor.image_std == tuple(reference.image_std)
    assert processor.resample == reference.resample
    assert processor.rescale_factor == reference.rescale_factor


def test_a_checkpoint_with_the_flat_configuration_of_older_releases_loads() -> None:
    flat = {k: v for k, v in CONFIG.items() if k != "text_config"} | CONFIG["text_config"]
    flat["model_type"] = "qwen2_5_vl"
    legacy = {"image_processor_type": "Qwen2VLImageProcessorFast", "min_pixels": 3136}
    family = parse_family(flat, legacy | {"max_pixels": 12845056})
    assert family.hidden_size == 256
    assert family.processor.max_pixels == 12845056


@pytest.mark.parametrize(
    ("config", "processor", "problem"),
    [
        pytest.param({"model_type": "gpt2"}, {}, "model_type is 'gpt2'.*qwen2_5_vl", id="family"),
        pytest.param({"model_type": None}, {}, "model_type must be a string", id="no family"),
        pytest.param({"image_token_id": "5"}, {}, "image_token_id must be", id="type"),
        pytest.param({"text_config": 1}, {}, "text_config must be an object", id="object"),
        pytest.param({}, {"image_processor_type": "X"}, "image_processor_type is 'X'", id="kind"),
        pytest.param({}, {"do_resize": False}, "do_resize is False", id="not built"),
        pytest.param({}, {"patch_size": 16}, "patch_size is 14.*is 16", id="disagreement"),
        pytest.param({}, {"image_mean": [0.5]}, "three numbers", id="channels"),
        pytest.param({}, {"image_std": [0, 1, 1]}, "image_std has a zero", id="zero"),
        pytest.param({}, {"rescale_factor": 0}, "positive number", id="number"),
        pytest.param({}, {"resample": 9}, "Pillow knows", id="resample"),
        pytest.param({}, {"size": {"longest_edge": 1}}, "below shortest_edge", id="budget"),
    ],
)
def test_a_file_that_cannot_be_honoured_names_its_field(
    config: dict[str, object], processor: dict[str, object], problem: str
) -> None:
    with pytest.raises(ModelConfigError, match=problem):
        parse_family(CONFIG | config, PROCESSOR | processor)


def test_missing_and_broken_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ModelConfigError, match=r"config\.json: cannot be read: No such file"):
        load_family(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelConfigError, match=r"config\.json: is not JSON"):
        load_family(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ModelConfigError, match="no JSON object"):
        load_family(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    with pytest.raises(ModelConfigError, match=r"preprocessor_config\.json: cannot be read"):
        load_family(tmp_path)
