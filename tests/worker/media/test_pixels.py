"""The model sees what a person sees: golden pixels, and no damaged file passes for an image."""

import io
import random
import struct
import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageFile, ImageOps
from worker.media.files import encode, noise
from worker.media.pooling import FAMILY

from vlm_worker.errors import InvalidImageError
from vlm_worker.media.image_header import read_header
from vlm_worker.media.patches import make_patches
from vlm_worker.media.pixels import (
    KEPT_BYTES,
    STRIP_ROWS,
    Canvas,
    UndecodableError,
    decode_rgb,
)

FORMATS = ("PNG", "JPEG", "WEBP", "GIF")


def decode(data: bytes) -> np.ndarray:
    return decode_rgb(data, read_header(data, item=0))


def scene(width: int = 24, height: int = 10) -> Image.Image:
    """Four unlike corners, so that no turn goes unnoticed."""
    pixels = np.zeros((height, width, 3), np.uint8)
    pixels[: height // 2, : width // 2] = (250, 10, 20)
    pixels[: height // 2, width // 2 :] = (10, 240, 30)
    pixels[height // 2 :, : width // 2] = (30, 20, 230)
    return Image.fromarray(pixels)


def raw_png(
    width: int, height: int, *, bits: int, color: int, rows: list[bytes], trns: bytes = b""
) -> bytes:
    """A PNG made by hand, for depths that Pillow does not write."""
    packed = zlib.compress(b"".join(b"\0" + row for row in rows))
    out = b"\x89PNG\r\n\x1a\n"
    header = struct.pack(">IIBBBBB", width, height, bits, color, 0, 0, 0)
    for kind, body in ((b"IHDR", header), (b"tRNS", trns), (b"IDAT", packed), (b"IEND", b"")):
        if body or kind != b"tRNS":
            out += struct.pack(">I", len(body)) + kind + body
            out += struct.pack(">I", zlib.crc32(kind + body))
    return out


@pytest.mark.parametrize("fmt", ["PNG", "JPEG", "WEBP"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_every_exif_orientation_is_applied(fmt: str, orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    options = {"lossless": True} if fmt == "WEBP" else {"quality": 95} if fmt == "JPEG" else {}
    data = encode(scene(), fmt, exif=exif, **options)
    with Image.open(io.BytesIO(data)) as image:
        wanted = np.asarray(ImageOps.exif_transpose(image).convert("RGB"))
    np.testing.assert_array_equal(decode(data), wanted)


def rgba(*pixels: tuple[int, int, int, int]) -> Image.Image:
    return Image.fromarray(np.array([pixels], np.uint8))


@pytest.mark.parametrize("fmt", ["PNG", "WEBP"])
def test_alpha_lies_over_white(fmt: str) -> None:
    image = rgba((0, 0, 0, 0), (0, 0, 0, 255), (0, 0, 0, 128), (200, 100, 0, 64))
    data = encode(image, fmt, **({"lossless": True, "exact": True} if fmt == "WEBP" else {}))
    assert decode(data)[0].tolist() == [
        [255, 255, 255],
        [0, 0, 0],
        [127, 127, 127],
        [241, 216, 191],
    ]


@pytest.mark.parametrize("height", [STRIP_ROWS - 1, STRIP_ROWS, 2 * STRIP_ROWS + 3])
def test_an_image_of_many_strips_is_the_one_that_is_laid_over_white_whole(height: int) -> None:
    image = noise(7, height).convert("RGBA")
    image.putalpha(noise(7, height, seed=1).convert("L"))
    white = Image.new("RGBA", image.size, "white")
    wanted = np.asarray(Image.alpha_composite(white, image).convert("RGB"))
    np.testing.assert_array_equal(decode(encode(image)), wanted)


def test_grey_with_alpha_lies_over_white() -> None:
    image = Image.fromarray(np.array([[[0, 0], [0, 255], [80, 128]]], np.uint8), "LA")
    assert decode(encode(image, "PNG"))[0, :, 0].tolist() == [255, 0, 167]


def palette_image() -> Image.Image:
    image = Image.new("P", (3, 1))
    image.putpalette([255, 0, 0, 0, 255, 0, 0, 0, 255])
    image.putdata([0, 1, 2])
    return image


def test_a_palette_becomes_its_colours() -> None:
    assert decode(encode(palette_image(), "PNG"))[0].tolist() == [
        [255, 0, 0],
        [0, 255, 0],
        [0, 0, 255],
    ]


def test_palette_transparency_lies_over_white() -> None:
    one = encode(palette_image(), "PNG", transparency=1)
    assert decode(one)[0].tolist() == [[255, 0, 0], [255, 255, 255], [0, 0, 255]]
    each = encode(palette_image(), "PNG", transparency=bytes([255, 128, 0]))
    assert decode(each)[0].tolist() == [[255, 0, 0], [127, 255, 127], [255, 255, 255]]


def test_a_transparent_colour_lies_over_white() -> None:
    image = Image.fromarray(np.array([[[9, 8, 7], [9, 8, 6]]], np.uint8))
    data = encode(image, "PNG", transparency=(9, 8, 7))
    assert decode(data)[0].tolist() == [[255, 255, 255], [9, 8, 6]]


@pytest.mark.parametrize(
    ("bits", "row", "trns", "wanted"),
    [
        pytest.param(1, b"\x40", b"", [0, 255], id="1 bit"),
        pytest.param(1, b"\x40", b"\0\0", [255, 255], id="1 bit, black transparent"),
        pytest.param(2, b"\x60", b"\0\1", [255, 170], id="2 bits, 1 transparent"),
        pytest.param(4, b"\x37", b"\0\3", [255, 119], id="4 bits, 3 transparent"),
        pytest.param(8, b"\x03\x07", b"\0\3", [255, 7], id="8 bits, 3 transparent"),
        pytest.param(16, struct.pack(">2H", 40000, 300), b"", [156, 1], id="16 bits"),
        pytest.param(
            16, struct.pack(">2H", 40000, 40001), struct.pack(">H", 40000), [255, 156], id="16 tRNS"
        ),
    ],
)
def test_grey_of_every_depth(bits: int, row: bytes, trns: bytes, wanted: list[int]) -> None:
    data = raw_png(2, 1, bits=bits, color=0, rows=[row], trns=trns)
    pixels = decode(data)
    assert pixels[0, :, 0].tolist() == wanted
    assert (pixels == pixels[:, :, :1]).all()


def test_16_bit_colour_is_scaled() -> None:
    row = struct.pack(">6H", 40000, 256, 65535, 0, 32768, 255)
    data = raw_png(2, 1, bits=16, color=2, rows=[row])
    wanted = np.array([[156, 1, 255], [0, 128, 0]])
    assert np.abs(decode(data)[0].astype(int) - wanted).max() <= 1


def test_16_bit_colour_with_a_transparent_colour_is_refused_in_words() -> None:
    data = raw_png(1, 1, bits=16, color=2, rows=[bytes(6)], trns=struct.pack(">3H", 0, 0, 0))
    with pytest.raises(UndecodableError, match="16-bit RGB PNG with a transparent colour"):
        decode(data)


@settings(max_examples=80)
@given(
    width=st.integers(1, 120),
    height=st.integers(1, 120),
    mode=st.sampled_from(["RGB", "L"]),
    subsampling=st.sampled_from(["4:4:4", "4:2:2", "4:2:0", "4:1:1"]),
    quality=st.integers(1, 100),
    progressive=st.booleans(),
)
def test_a_jpegs_pixels_do_not_depend_on_which_library_reads_them(
    width: int, height: int, mode: str, subsampling: str, quality: int, progressive: bool
) -> None:
    rng = np.random.default_rng(width * height)
    image = Image.fromarray(rng.integers(0, 256, (height, width, 3), dtype=np.uint8))
    options = {"subsampling": subsampling} if mode == "RGB" else {}
    data = encode(image.convert(mode), "JPEG", quality=quality, progressive=progressive, **options)
    with Image.open(io.BytesIO(data)) as opened:
        wanted = np.asarray(opened.convert("RGB"))
    try:
        header = read_header(data, item=0)
    except InvalidImageError:  # narrower than 1:200
        return
    np.testing.assert_array_equal(decode_rgb(data, header), wanted)


def test_a_jpeg_that_holds_rgb_is_read_as_such() -> None:
    data = encode(scene(), "JPEG", keep_rgb=True, quality=100)
    assert np.abs(decode(data).astype(int) - np.asarray(scene())).max() <= 3


def test_cmyk_becomes_rgb() -> None:
    for rgb, cmyk in (((255, 255, 255), (0, 0, 0, 0)), ((255, 0, 0), (0, 255, 255, 0))):
        data = encode(Image.new("CMYK", (16, 16), cmyk), "JPEG", quality=95)
        assert np.abs(decode(data).astype(int) - rgb).max() <= 3


def adobe_jpeg(pixel: tuple[int, int, int, int], *, transform: int) -> bytes:
    """Four flat channels as they are stored, under an Adobe marker that names their meaning."""
    data = bytearray(encode(Image.new("CMYK", (16, 16), pixel), "JPEG", quality=100))
    at = data.index(b"Adobe") + 11
    assert data[at] == 0
    data[at] = transform
    return bytes(data)


@pytest.mark.parametrize(
    ("stored", "wanted"),
    [
        # Pillow stores 255 - x; Y, Cb and Cr are those of the ink, which is 255 - the colour.
        pytest.param((255, 127, 127, 0), (255, 255, 255), id="no ink"),
        pytest.param((0, 127, 127, 0), (0, 0, 0), id="all inks"),
        pytest.param((76, 84, 255, 0), (255, 0, 0), id="red"),
        pytest.param((150, 43, 21, 0), (0, 255, 0), id="green"),
        pytest.param((255, 127, 127, 255), (0, 0, 0), id="black"),
    ],
)
def test_ycck_becomes_rgb(stored: tuple[int, int, int, int], wanted: tuple[int, int, int]) -> None:
    pixels = decode(adobe_jpeg(stored, transform=2))
    assert np.abs(pixels.astype(int) - wanted).max() <= 3, pixels[0, 0]


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "LA", "L"])
@pytest.mark.parametrize("value", [0, 255])
def test_an_image_of_one_value_has_finite_patches(mode: str, value: int) -> None:
    channels = len(Image.new(mode, (1, 1)).getbands())
    flat = Image.new(mode, (30, 20), (value,) * channels if channels > 1 else value)
    rgb = decode(encode(flat, "PNG"))
    processor = FAMILY.processor
    patches = make_patches(rgb, processor, FAMILY.geometry(20, 30))
    assert patches.size > 0
    assert np.isfinite(patches).all()


def test_a_gif_frame_smaller_than_its_canvas_lies_on_white() -> None:
    image = Image.new("P", (2, 2), 0)
    image.putpalette([200, 0, 0])
    data = bytearray(encode(image, "GIF"))
    data[6:10] = struct.pack("<HH", 4, 3)
    at = data.index(b",\0\0\0\0\x02\0\x02\0")
    data[at + 1 : at + 5] = struct.pack("<HH", 1, 1)
    pixels = decode(bytes(data)).copy()
    assert pixels.shape == (3, 4, 3)
    assert (pixels[1:3, 1:3] == (200, 0, 0)).all()
    pixels[1:3, 1:3] = 255
    assert (pixels == 255).all()


def test_a_transparent_gif_lies_on_white() -> None:
    data = encode(palette_image(), "GIF", transparency=0)
    assert decode(data)[0].tolist() == [[255, 255, 255], [0, 255, 0], [0, 0, 255]]


@pytest.mark.parametrize("fmt", FORMATS)
def test_a_plain_image_is_what_pillow_reads(fmt: str) -> None:
    data = encode(Image.effect_noise((65, 33), 60).convert("RGB"), fmt)
    with Image.open(io.BytesIO(data)) as image:
        wanted = np.asarray(image.convert("RGB"))
    np.testing.assert_array_equal(decode(data), wanted)


@pytest.mark.parametrize("fmt", FORMATS)
def test_flipped_bytes_give_an_image_or_the_one_error(fmt: str) -> None:
    """In process, to see what the decoders raise; their crashes are the pool's tests."""
    rng = random.Random(7)
    whole = encode(Image.effect_noise((24, 16), 60).convert("RGB"), fmt)
    for _ in range(300):
        data = bytearray(whole)
        for _ in range(rng.randint(1, 4)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        try:
            header = read_header(bytes(data), item=0)
        except InvalidImageError:
            continue
        if header.width * header.height > 10_000:
            continue
        try:
            pixels = decode_rgb(bytes(data), header)
        except UndecodableError as error:
            text = str(error)
        else:
            text = ""
            assert pixels.shape == (header.height, header.width, 3)
        assert "0x" not in text
        assert "PIL" not in text


def test_a_header_that_lies_about_the_size_is_found_out() -> None:
    data = encode(scene(), "PNG")
    other = read_header(encode(scene(30, 10), "PNG"), item=0)
    with pytest.raises(UndecodableError, match="not of the size"):
        decode_rgb(data, other)


def test_text_chunks_that_expand_do_not_cost_memory() -> None:
    bomb = zlib.compress(bytes(64 << 20), 9)
    data = encode(scene(), "PNG")
    chunk = b"zTXt" + b"k\0\0" + bomb
    framed = struct.pack(">I", len(chunk) - 4) + chunk + struct.pack(">I", zlib.crc32(chunk))
    with pytest.raises(UndecodableError, match="damaged"):
        decode(data[:33] + framed + data[33:])


def test_pillows_own_guards_stay_in_place() -> None:
    assert ImageFile.LOAD_TRUNCATED_IMAGES is False
    assert Image.MAX_IMAGE_PIXELS == 89_478_485


SHAPES = st.tuples(st.integers(1, 90), st.integers(1, 90), st.sampled_from(FORMATS))


@settings(max_examples=40)
@given(shapes=st.lists(SHAPES, min_size=2, max_size=6), turned=st.booleans())
def test_images_that_follow_each_other_on_one_canvas_are_those_on_their_own(
    shapes: list[tuple[int, int, str]], turned: bool
) -> None:
    canvas, exif = Canvas(), Image.Exif()
    exif[0x0112] = 6 if turned else 1
    for seed, (width, height, fmt) in enumerate(shapes):
        data = encode(noise(width, height, seed), fmt, **({"exif": exif} if fmt == "JPEG" else {}))
        header = read_header(data, item=0)
        found = decode_rgb(data, header, canvas=canvas)
        np.testing.assert_array_equal(found, decode_rgb(data, header))


def test_a_canvas_keeps_memory_for_an_image_no_larger_and_drops_it_for_pillow() -> None:
    canvas = Canvas()
    jpeg, png = (encode(noise(60, 40), fmt) for fmt in ("JPEG", "PNG"))
    first, second = (decode_rgb(jpeg, read_header(jpeg, item=0), canvas=canvas) for _ in range(2))
    assert np.shares_memory(first, second)
    decode_rgb(png, read_header(png, item=0), canvas=canvas)
    assert not np.shares_memory(first, canvas.of(1))


def test_a_canvas_keeps_no_more_than_it_may() -> None:
    canvas = Canvas()
    assert len(canvas.of(KEPT_BYTES + 1)) == KEPT_BYTES + 1
    assert not np.shares_memory(canvas.of(KEPT_BYTES + 1), canvas.of(1))
    kept = canvas.of(KEPT_BYTES)
    assert np.shares_memory(kept, canvas.of(KEPT_BYTES))
