"""Images of a request, counted from their headers."""

from __future__ import annotations

import pytest
from worker.gateway.image_files import data_url, encoded, png
from worker.gateway.stack import MODEL

from vlm_worker.core.families import load_family
from vlm_worker.gateway.api.errors import ApiError
from vlm_worker.gateway.api.parts import ImagePart
from vlm_worker.gateway.config import Config, Limits
from vlm_worker.gateway.images import RequestImage, read_images
from vlm_worker.gateway.turns import at_once
from vlm_worker.gateway.visual import VisualLimits, VisualPolicy

FAMILY = load_family(MODEL)
PLAIN = VisualPolicy(VisualLimits(), FAMILY, tenant="", visual=None, messages=())


def read(
    data: bytes, detail: str = "auto", kind: str = "image/png", **limits: object
) -> RequestImage:
    config = Config(limits=Limits(**limits))  # type: ignore[arg-type]
    part = ImagePart(data_url(data, kind), detail, "here")  # type: ignore[arg-type]
    (image,) = at_once(read_images([part], config, FAMILY, visual=PLAIN))
    assert image is not None
    return image


@pytest.mark.parametrize("form", ["PNG", "JPEG", "WEBP", "GIF"])
def test_every_format_is_counted_alike(form: str) -> None:
    image = read(encoded(form), kind=f"image/{form.lower()}")
    assert (image.format, image.width, image.height) == (form, 112, 84)
    assert image.num_tokens == 12


def test_low_detail_costs_fewer_tokens() -> None:
    large = png(size=(448, 448))
    assert read(large).num_tokens == read(large, "high").num_tokens == 256
    assert read(large, "original").num_tokens == 256
    low = read(large, "low")
    assert low.num_tokens == 64
    assert low.max_pixels == 448 * 448 // 4


@pytest.mark.parametrize("side", [112, 224, 225, 448])
def test_a_cap_without_effect_is_not_sent(side: int) -> None:
    """The encoder's key contains the cap: another key would encode the image again."""
    image = png(size=(side, side))
    whole, low = read(image), read(image, "low")
    assert (low.max_pixels == 0) == (low.num_tokens == whole.num_tokens)
    assert whole.max_pixels == 0


def test_an_oversized_image_is_scaled_down_or_refused_as_the_service_says() -> None:
    large = png(size=(448, 448))
    scaled = read(large, pixels_per_image=100_000, on_oversize="Downscale")
    assert scaled.num_tokens <= 100_000 / 28**2
    assert scaled.max_pixels == 100_000
    with pytest.raises(ApiError, match="448x448") as refused:
        read(large, pixels_per_image=100_000, on_oversize="Reject")
    assert (refused.value.code, refused.value.param) == ("image_too_large", "here")


def test_more_bytes_than_allowed_are_refused_before_they_are_decoded() -> None:
    with pytest.raises(ApiError, match="more than 100 bytes"):
        read(png(), bytes_per_image=100)


def test_a_broken_image_is_left_out_where_the_service_says_so() -> None:
    parts = [ImagePart(data_url(data), "auto", "x") for data in (png(), png()[:30])]
    config = Config(limits=Limits(on_corrupt="Skip"))
    found = at_once(read_images(parts, config, FAMILY, visual=PLAIN))
    assert found[0] is not None
    assert found[1] is None


@pytest.mark.parametrize("form", ["PNG", "JPEG", "WEBP", "GIF"])
def test_the_content_says_which_format_it_is_whatever_the_url_says(form: str) -> None:
    assert read(encoded(form), kind="image/jpeg").format == form
    assert read(encoded(form), kind="image/png").format == form


def test_too_many_images_are_told_where_the_limit_is_set() -> None:
    parts = [ImagePart(data_url(png()), "auto", str(i)) for i in range(3)]
    with pytest.raises(ApiError, match="up to 2 images a request, this one has 3") as refused:
        at_once(
            read_images(parts, Config(limits=Limits(images_per_request=2)), FAMILY, visual=PLAIN)
        )
    assert refused.value.param == "2"
    assert "model.limits.imagesPerRequest" in refused.value.message
    assert "--images-per-request" in refused.value.message
