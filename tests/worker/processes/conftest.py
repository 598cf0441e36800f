"""A driver, images, and pools of real processes."""

from __future__ import annotations

import io

import pytest
from PIL import Image
from worker.processes.driver import Driver
from worker.processes.workers import MODEL

from vlm_worker.core.families import Family, load_family


@pytest.fixture(scope="session")
def family() -> Family:
    return load_family(MODEL)


@pytest.fixture
def driver(family: Family) -> Driver:
    return Driver(family)


def png(colour: tuple[int, int, int], width: int = 112, height: int = 84) -> bytes:
    """An image as a client sends it."""
    out = io.BytesIO()
    Image.new("RGB", (width, height), colour).save(out, "PNG")
    return out.getvalue()
