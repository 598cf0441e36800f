"""What may come in: decided by the header alone."""

import contextlib
import io
import struct
import sys
import zlib
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from vlm_worker.errors import InvalidImageError
from vlm_worker.media.image_header import ImageHeader, ImageLimits, read_header

FORMATS = ("PNG", "JPEG", "WEBP", "GIF")


def encode(image: Image.Image, fmt: str, **options: object) -> bytes:
    out = io.BytesIO()
    image.save(out, fmt, **options)
    return out.getvalue()


def sample(width: int = 40, height: int = 20, mode: str = "RGB") -> Image.Image:
    return Image.linear_gradient("L").resize((width, height)).convert(mode)


@contextlib.contextmanager
def at_most_lines(limit: int) -> Iterator[None]:
    """Raise AssertionError if the block runs more lines of Python: a count, since time varies."""
    num_lines = 0

    def trace(_frame: Any, event: str, _arg: Any) -> Any:
        nonlocal num_lines
        num_lines += event == "line"
        assert num_lines <= limit, f"more than {limit} lines"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)
    print(f"{num_lines} lines")


SAMPLES = {fmt: encode(sample(), fmt) for fmt in FORMATS}


def refused(data: bytes, **options: object) -> InvalidImageError:
    with pytest.raises(InvalidImageError) as caught:
        read_header(data, item=3, **options)
    assert caught.value.item == 3
    return caught.value


def png(width: int, height: int, *chunks: tuple[bytes, bytes], bits: int = 8) -> bytes:
    """A PNG whose header claims a size; its pixels are not looked at."""
    header = struct.pack(">IIBBBBB", width, height, bits, 2, 0, 0, 0)
    out = bytearray(b"\x89PNG\r\n\x1a\n")
    for kind, body in ((b"IHDR", header), *chunks, (b"IEND", b"")):
        out += struct.pack(">I", len(body)) + kind + body
        out += struct.pack(">I", zlib.crc32(kind + body))
    return bytes(out)


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("size", [(1, 1), (40, 20), (333, 777)])
def test_format_and_size_are_read(fmt: str, size: tuple[int, int]) -> None:
    header = read_header(encode(sample(*size), fmt), item=0)
    assert header == ImageHeader(fmt, *size, orientation=1, bits=8)


@pytest.mark.parametrize(
    ("fmt", "options"),
    [
        pytest.param("JPEG", {"progressive": True}, id="progressive"),
        pytest.param("WEBP", {"lossless": True}, id="lossless"),
        pytest.param("PNG", {"interlace": 1}, id="interlaced"),
    ],
)
def test_variants_of_a_format_are_read(fmt: str, options: dict[str, object]) -> None:
    header = read_header(encode(sample(), fmt, **options), item=0)
    assert (header.width, header.height) == (40, 20)


def test_webp_with_alpha_is_read_from_its_extended_header() -> None:
    data = encode(sample(mode="RGBA"), "WEBP", exif=Image.Exif(), icc_profile=b"x" * 200)
    assert b"VP8X" in data
    header = read_header(data, item=0)
    assert (header.width, header.height) == (40, 20)


@pytest.mark.parametrize("fmt", ["PNG", "JPEG", "WEBP"])
@pytest.mark.parametrize("value", range(1, 9))
def test_exif_orientation_turns_the_size(fmt: str, value: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = value
    header = read_header(encode(sample(), fmt, exif=exif), item=0)
    assert header.orientation == value
    assert (header.width, header.height) == ((20, 40) if value >= 5 else (40, 20))


@pytest.mark.parametrize(
    "tiff",
    [
        pytest.param(b"", id="empty"),
        pytest.param(b"II*\0", id="cut off"),
        pytest.param(b"XX*\0\x08\0\0\0" + bytes(40), id="no byte order"),
        pytest.param(b"II*\0\xff\xff\xff\xff", id="directory beyond the end"),
        pytest.param(b"II*\0\x08\0\0\0\xff\xff" + bytes(5), id="entries beyond the end"),
        pytest.param(
            b"II*\0\x08\0\0\0\x01\0" + struct.pack("<HHIHH", 0x112, 3, 1, 9, 0), id="value 9"
        ),
        pytest.param(
            b"II*\0\x08\0\0\0\x01\0" + struct.pack("<HHII", 0x112, 4, 1, 6), id="wrong type"
        ),
    ],
)
def test_broken_exif_is_ignored(tiff: bytes) -> None:
    header = read_header(png(40, 20, (b"eXIf", tiff)), item=0)
    assert (header.width, header.orientation) == (40, 1)


def test_a_megabyte_of_exif_costs_nothing() -> None:
    entries = b"II*\0\x08\0\0\0\xff\xff" + bytes(1 << 20)
    with at_most_lines(10_000):
        assert read_header(png(40, 20, (b"eXIf", entries)), item=0).orientation == 1


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(encode(sample(), "TIFF"), id="TIFF"),
        pytest.param(encode(sample(), "BMP"), id="BMP"),
        pytest.param(encode(sample(), "ICO"), id="ICO"),
        pytest.param(encode(sample(), "PPM"), id="PPM"),
        pytest.param(encode(sample(), "EPS"), id="EPS"),
        pytest.param(encode(sample(), "PDF"), id="PDF"),
        pytest.param(b"8BPS\0\x01" + bytes(60), id="PSD"),
        pytest.param(b'<svg xmlns="http://www.w3.org/2000/svg"/>', id="SVG"),
        pytest.param(b"\0\0\0\x18ftypheic" + bytes(40), id="HEIC"),
        pytest.param(b"\0\0\0\x18ftypavif" + bytes(40), id="AVIF"),
        pytest.param(b"\0\0\0\x0cjP  \r\n\x87\n" + bytes(40), id="JPEG2000"),
        pytest.param(b"SIMPLE  =" + bytes(40), id="FITS"),
        pytest.param(b"", id="nothing"),
        pytest.param(b"hello", id="text"),
        pytest.param(b"RIFF\0\0\0\0WAVE", id="another RIFF"),
        pytest.param(b"%!PS\n" + encode(sample(), "PNG"), id="PNG behind PostScript"),
    ],
)
def test_other_formats_are_refused_by_their_first_bytes(data: bytes) -> None:
    error = refused(data)
    assert error.code == "unsupported_image_format"
    assert "PNG, JPEG, WEBP, GIF" in str(error)


def test_a_polyglot_is_what_its_first_bytes_say() -> None:
    data = encode(sample(), "GIF") + b"<script>alert(1)</script>%PDF-1.4"
    assert read_header(data, item=0).format == "GIF"


def test_a_media_type_must_agree_with_the_content() -> None:
    data = encode(sample(), "PNG")
    assert read_header(data, item=0, mime_type="IMAGE/PNG").format == "PNG"
    assert refused(data, mime_type="image/jpeg").code == "image_type_mismatch"
    assert refused(data, mime_type="image/svg+xml").code == "unsupported_image_format"


@pytest.mark.parametrize(
    ("data", "numbers"),
    [
        pytest.param(png(8193, 100), "8193x100", id="side"),
        pytest.param(png(8192, 2049), "8192x2049", id="pixels"),
        pytest.param(png(13000, 13000), "13000x13000", id="both"),
        pytest.param(png(1, 1_000_000), "1x1000000", id="a line"),
        pytest.param(png(2**31, 2**31), str(2**31), id="absurd"),
    ],
)
def test_too_many_pixels_are_refused_with_the_numbers(data: bytes, numbers: str) -> None:
    error = refused(data)
    assert error.code == "image_too_large"
    assert numbers in str(error)
    assert "8192 a side" in str(error)
    assert "send it smaller" in str(error)


def test_exactly_the_limit_may_pass_and_one_more_may_not() -> None:
    assert read_header(png(4096, 4096), item=0).width == 4096
    assert refused(png(4096, 4097)).code == "image_too_large"
    limits = ImageLimits(max_bytes=len(png(1, 1)))
    assert read_header(png(1, 1), item=0, limits=limits).width == 1
    error = refused(png(1, 1) + b"x", limits=limits)
    assert error.code == "image_too_large"
    assert str(limits.max_bytes) in str(error)


def test_narrow_images_are_refused_and_200_to_1_is_not() -> None:
    assert read_header(png(2000, 10), item=0).width == 2000
    assert refused(png(2001, 10)).code == "image_aspect_ratio"
    assert refused(png(1, 8000)).code == "image_aspect_ratio"


def test_images_without_pixels_are_refused() -> None:
    assert "0x5" in str(refused(png(0, 5)))


def animation(fmt: str, count: int) -> bytes:
    frames = [sample().rotate(10 * i) for i in range(count)]
    return encode(frames[0], fmt, save_all=True, append_images=frames[1:], duration=10)


@pytest.mark.parametrize("fmt", ["GIF", "PNG", "WEBP"])
def test_animations_are_refused(fmt: str) -> None:
    error = refused(animation(fmt, 3))
    assert error.code == "animated_not_supported"
    assert "still" in str(error)


def test_a_gif_of_300_frames_is_refused_without_walking_them() -> None:
    data = animation("GIF", 300)
    with at_most_lines(1_000):
        assert refused(data).code == "animated_not_supported"


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        pytest.param(png(9, 9)[:-12], "ends before", id="PNG without an end"),
        pytest.param(b"\x89PNG\r\n\x1a\n" + bytes(40), "damaged", id="PNG without IHDR"),
        pytest.param(b"\xff\xd8\xff\xd9" + bytes(9), "no frame header", id="JPEG without a frame"),
        pytest.param(
            b"\xff\xd8\xff\xc3\0\x11\x08\0\x10\0\x10" + bytes(9), "lossless", id="lossless JPEG"
        ),
        pytest.param(
            b"\xff\xd8\xff\xc1\0\x11\x0c\0\x10\0\x10" + bytes(9), "12 bits", id="12-bit JPEG"
        ),
        pytest.param(b"RIFF\xff\xff\xff\x7fWEBPVP8 ", "shorter", id="WebP cut off"),
        pytest.param(b"RIFF\x04\0\0\0WEBP", "no image", id="empty WebP"),
        pytest.param(b"GIF89a\x10\0\x10\0\0\0\0;", "no image", id="empty GIF"),
        pytest.param(b"GIF89a\x10\0\x10\0\0\0\0xxx", "damaged", id="GIF with garbage"),
        pytest.param(png(9, 9, *[(b"teXt", b"")] * 9000), "8192 chunks", id="PNG of chunks"),
        pytest.param(
            b"GIF89a\x10\0\x10\0\0\0\0!\xff" + b"\x01x" * 200000, "damaged", id="GIF of sub-blocks"
        ),
    ],
)
def test_damaged_headers_are_refused_in_plain_words(data: bytes, problem: str) -> None:
    error = refused(data)
    assert error.code == "invalid_image"
    assert problem in str(error)


@settings(max_examples=400)
@given(st.data())
def test_any_bytes_give_a_header_or_the_one_error(data: st.DataObject) -> None:
    fmt = data.draw(st.sampled_from(FORMATS))
    raw = bytearray(SAMPLES[fmt])
    for _ in range(data.draw(st.integers(0, 8))):
        raw[data.draw(st.integers(0, min(len(raw) - 1, 80)))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(raw)))
    try:
        header = read_header(bytes(raw[:cut]), item=0)
    except InvalidImageError:
        return
    assert 0 < header.width * header.height <= 16_777_216


def gif(*blocks: bytes) -> bytes:
    frame = struct.pack("<HHHHB", 0, 0, 4000, 4000, 0)
    data = b"GIF89a" + struct.pack("<HH", 4000, 4000) + b"\0\0\0," + frame + b"\x08"
    return data + b"".join(blocks) + b"\0;"


MIB = 1 << 20


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(png(4096, 4096, *[(b"IDAT", bytes(4096))] * 5000), id="PNG as encoders write"),
        pytest.param(png(4096, 4096, *[(b"IDAT", b"")] * 100_000), id="PNG of empty chunks"),
        pytest.param(gif(*[b"\xff" + bytes(255)] * 81_900), id="GIF as encoders write"),
        pytest.param(gif(b"\x01\0" * (9 * MIB)), id="GIF of tiny sub-blocks"),
        pytest.param(b"\xff\xd8\xff" + b"\xfe\0\2\xff" * MIB, id="JPEG of empty segments"),
        pytest.param(b"\xff\xd8" + b"\xff" * (19 * MIB), id="JPEG of fill bytes"),
        pytest.param(
            b"RIFF" + struct.pack("<I", 16 * MIB + 4) + b"WEBP" + b"junk\0\0\0\0" * (2 * MIB),
            id="WebP of empty chunks",
        ),
    ],
)
def test_no_file_takes_long(data: bytes) -> None:
    """A loop over 20 MiB of bytes runs 20,000,000 lines. A GIF may have 98,304 sub-blocks."""
    with at_most_lines(600_000), contextlib.suppress(InvalidImageError):
        read_header(data, item=0)
