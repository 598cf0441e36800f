"""Every kernel compiles for a GPU, here, without one, and fits into its shared memory."""

from __future__ import annotations

import json
import pkgutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from vlm_kernels import gpu

COMPILE_ALL = Path(__file__).with_name("compile_all.py")
ADA, AMPERE, HOPPER = 89, 80, 90
HELPERS = {
    "attention_shapes",
    "attention_step",
    "configs",
    "functions",
}


def compiled(*names: str, capability: int = HOPPER) -> list[dict[str, Any]]:
    """What fits, as compiled for such a GPU."""
    done = subprocess.run(
        [sys.executable, str(COMPILE_ALL), str(capability), *names],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = [json.loads(line) for line in done.stdout.splitlines()]
    for line in found:
        assert line["cubin_bytes"] > 0
        assert line["shared_bytes"] <= line["limit_bytes"], line
    return found


def test_the_kernels_of_a_decoder_layer_compile() -> None:
    found = compiled("paged_attention", "rope_store_kv int8")
    assert {line["kernel"] for line in found} == {"_attend", "_rotate", "_rotate_store", "_store"}


@pytest.mark.parametrize(
    ("name", "capability"),
    [
        ("received_attention", HOPPER),
        ("received_attention float32", ADA),
    ],
)
def test_received_attention_compiles(name: str, capability: int) -> None:
    found = compiled(name, capability=capability)
    assert {line["kernel"] for line in found} == {"_logarithms", "_receive"}


@pytest.mark.parametrize("name", ["attention_mass", "attention_mass int8"])
def test_attention_mass_compiles(name: str) -> None:
    found = compiled(name)
    assert {line["kernel"] for line in found} == {"_logarithms", "_receive"}


@pytest.mark.parametrize(
    "name",
    [
        "paged_attention of Gemma",
        "paged_attention, blocks of 64",
        pytest.param("paged_attention float16", marks=pytest.mark.full),
        pytest.param("paged_attention float32", marks=pytest.mark.full),
    ],
)
def test_attention_compiles_for_heads_of_256_other_types_and_the_default_block(name: str) -> None:
    found = compiled(name)
    assert {line["kernel"] for line in found} == {"_attend", "_combine"}


@pytest.mark.parametrize(
    ("name", "capability"),
    [
        ("paged_attention of Gemma", ADA),
        *(
            pytest.param(name, capability, marks=pytest.mark.full)
            for name in (
                "paged_attention float32",
                "paged_attention of Gemma, float32",
                "varlen_attention float32",
            )
            for capability in (ADA, AMPERE)
        ),
    ],
)
def test_attention_that_needs_most_fits_into_gpus_with_less_shared_memory(
    name: str, capability: int
) -> None:
    assert "_attend" in {line["kernel"] for line in compiled(name, capability=capability)}


@pytest.mark.full
@pytest.mark.parametrize("capability", [ADA, AMPERE, HOPPER])
def test_all_kernels_compile(capability: int) -> None:
    found = compiled(capability=capability)
    modules = {module.name for module in pkgutil.iter_modules(gpu.__path__)} - HELPERS
    assert {line["module"].rpartition(".")[2] for line in found} == modules
