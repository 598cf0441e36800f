"""Decodes a file to the pixels that viewers show: oriented, 8 bits, RGB, transparency over white.

Runs only in the decode child. Rules for cases in which libraries differ:

    orientation    the EXIF field as `image_header` read it; XMP and other places are ignored
    transparency   over white, for an alpha channel, palette alpha or a transparent colour (tRNS)
    16 bits        scaled to 8 (40000 becomes 156), never clipped
    CMYK, YCCK     converted without a profile; ICC profiles are ignored
    GIF            the first frame on its canvas; uncovered areas are white

If a smaller image suffices, a common JPEG may be decoded at a half, a quarter or an eighth of its
sides. libjpeg-turbo then drops frequencies instead of averaging pixels. This is opt-in, because the
pixels differ. A damaged file is refused with the same message in both cases.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping

import numpy as np
import simplejpeg
from PIL import GifImagePlugin, Image, ImageFile, JpegImagePlugin, PngImagePlugin, WebPImagePlugin

from vlm_worker.media.image_header import ImageHeader

KEPT_BYTES = 64 << 20
"""Bytes of an image of 22 megapixels."""
STRIP_ROWS = 256

# The plugins themselves, never Image.open: a file's bytes cannot select another format's code.
_PLUGINS: Mapping[str, Callable[[io.BytesIO], ImageFile.ImageFile]] = {
    "PNG": PngImagePlugin.PngImageFile,
    "JPEG": JpegImagePlugin.JpegImageFile,
    "WEBP": WebPImagePlugin.WebPImageFile,
    "GIF": GifImagePlugin.GifImageFile,
}

# How to undo each EXIF orientation: views of `[height, width, 3]`.
_TURNS: Mapping[int, Callable[[np.ndarray], np.ndarray]] = {
    2: lambda rgb: rgb[:, ::-1],
    3: lambda rgb: rgb[::-1, ::-1],
    4: lambda rgb: rgb[::-1],
    5: lambda rgb: rgb.swapaxes(0, 1),
    6: lambda rgb: np.rot90(rgb, k=-1),
    7: lambda rgb: rgb[::-1, ::-1].swapaxes(0, 1),
    8: np.rot90,
}


class UndecodableError(ValueError):
    """The text may be sent to a client."""


class Canvas:
    """Memory for pixels, reused for later images: the kernel must zero new memory.

    A buffer larger than `KEPT_BYTES` is freed after its image, so that an idle child stays small.
    """

    def __init__(self) -> None:
        self._kept = np.empty(0, np.uint8)

    def of(self, num_bytes: int) -> np.ndarray:
        """uint8 `[num_bytes]`, uninitialised; raises MemoryError."""
        if num_bytes <= len(self._kept):
            return self._kept[:num_bytes]
        self.drop()
        memory = np.empty(num_bytes, np.uint8)
        if num_bytes <= KEPT_BYTES:
            self._kept = memory
        return memory

    def drop(self) -> None:
        self._kept = np.empty(0, np.uint8)


def decode_rgb(
    data: bytes | bytearray,
    header: ImageHeader,
    *,
    enough: tuple[int, int] | None = None,
    canvas: Canvas | None = None,
) -> np.ndarray:
    """Decode one image.

    `enough` is the minimum oriented height and width to which a JPEG may be scaled; None is its
    full size. `canvas` is memory for the pixels of a common JPEG, valid until the next image.

    Returns:
        uint8 `[height, width, 3]`, C-contiguous, of the header's oriented size. If `enough` allows
        it, the size is divided by 2, 4 or 8 and rounded up.

    Raises:
        UndecodableError: the file is damaged, truncated, or its size differs from the header's.
        MemoryError: it needs more memory than the child has.
    """
    try:
        divisor = 1 if enough is None else _divisor(header, *enough)
        canvas = canvas or Canvas()
        rgb = _plain_jpeg(data, header, divisor, canvas) if header.format == "JPEG" else None
        if rgb is None:
            divisor = 1
            canvas.drop()  # free it first: one image's memory is bounded in total
            rgb = np.asarray(_with_pillow(data, header))
    except (UndecodableError, MemoryError):
        raise
    # A decoder may raise any exception for malformed bytes. Its message may contain addresses and
    # paths, so it is not passed on.
    except Exception as error:
        raise UndecodableError(f"the {header.format} is damaged or cut off") from error
    if header.orientation in _TURNS:
        rgb = _TURNS[header.orientation](rgb)
    if rgb.shape != (_divided(header.height, divisor), _divided(header.width, divisor), 3):
        raise UndecodableError(f"the {header.format} is not of the size in its header")
    return np.ascontiguousarray(rgb)


def _divisor(header: ImageHeader, height: int, width: int) -> int:
    """The largest divisor that leaves the image at least this large."""
    for divisor in (8, 4, 2):
        if _divided(header.height, divisor) >= height and _divided(header.width, divisor) >= width:
            return divisor
    return 1


def _divided(side: int, divisor: int) -> int:
    """`side / divisor`, rounded up as libjpeg-turbo does."""
    return -(-side // divisor)


def _plain_jpeg(
    data: bytes | bytearray, header: ImageHeader, divisor: int, canvas: Canvas
) -> np.ndarray | None:
    """Decode a common JPEG with libjpeg-turbo: the same pixels as Pillow with fewer copies.

    Returns None for CMYK, for a size that differs from the header's, and if libjpeg-turbo warns.
    Pillow then decodes the file or refuses it.
    """
    try:
        height, width, colorspace, _ = simplejpeg.decode_jpeg_header(data, strict=True)
        if colorspace not in ("YCbCr", "Gray") or (height, width) != header.stored_size:
            return None
        height, width = _divided(height, divisor), _divided(width, divisor)
        pixels: np.ndarray = simplejpeg.decode_jpeg(
            data,
            "RGB",
            min_height=height,
            min_width=width,
            buffer=canvas.of(height * width * 3),
            strict=True,
        )
        return pixels
    except ValueError:
        return None


def _with_pillow(data: bytes | bytearray, header: ImageHeader) -> Image.Image:
    with _PLUGINS[header.format](io.BytesIO(data)) as image:
        covered = image.tile[0].extents if header.format == "GIF" else None
        image.load()
        return _to_rgb(image, header, covered)


def _to_rgb(
    image: ImageFile.ImageFile, header: ImageHeader, covered: tuple[int, int, int, int] | None
) -> Image.Image:
    mode, transparent = image.mode, image.info.get("transparency")
    if mode in ("1", "L", "I;16") and header.format == "PNG":
        return _grey_png(image, transparent, header.bits)
    if mode == "RGB" and transparent is not None and header.bits == 16:
        raise UndecodableError("a 16-bit RGB PNG with a transparent colour is not supported")
    if mode in ("LA", "RGBA", "PA") or transparent is not None:
        rgb = _over_white(image if mode == "RGBA" else image.convert("RGBA"))
    elif mode in ("1", "L", "P", "RGB", "CMYK"):
        rgb = image.convert("RGB")
    else:
        raise UndecodableError(f"pixels of mode {mode} are not supported")
    if covered is not None and covered != (0, 0, *image.size):
        canvas = Image.new("RGB", image.size, "white")
        canvas.paste(rgb.crop(covered), covered)
        return canvas
    return rgb


def _grey_png(image: Image.Image, transparent: object, bits: int) -> Image.Image:
    """Convert grey of any depth to RGB; the transparent grey value is in the file's depth."""
    if image.mode == "I;16":
        raw = np.asarray(image, dtype=np.uint32)
        grey = ((raw * 255 + 32767) // 65535).astype(np.uint8)
        white = raw == transparent if isinstance(transparent, int) else None
    else:
        grey = np.asarray(image.convert("L"))
        scale = 255 // ((1 << bits) - 1)
        white = grey == transparent * scale if isinstance(transparent, int) else None
    if white is not None:
        grey = np.where(white, np.uint8(255), grey)
    return Image.fromarray(grey).convert("RGB")


def _over_white(rgba: Image.Image) -> Image.Image:
    """Composite over white, strip by strip: the only full copy of the image is the result."""
    rgb = Image.new("RGB", rgba.size)
    for top in range(0, rgba.height, STRIP_ROWS):
        strip = rgba.crop((0, top, rgba.width, min(top + STRIP_ROWS, rgba.height)))
        white = Image.new("RGBA", strip.size, "white")
        rgb.paste(Image.alpha_composite(white, strip).convert("RGB"), (0, top))
    return rgb
