"""Models from a hub: from an endpoint that speaks its API, with progress, then from the cache."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import pytest
from worker.serve.hub import COMMIT, MODEL, Hub

from vlm_worker.core.model_files import ModelConfigError
from vlm_worker.serve.sources import fetch_model
from vlm_worker.settings import ModelSource

FETCH = """
import sys
from pathlib import Path
from vlm_worker.core.model_files import ModelConfigError
from vlm_worker.serve.sources import fetch_model
from vlm_worker.settings import ModelSource
source = ModelSource(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
try:
    print("DIR", fetch_model(source, lambda message: print("SAID", message)))
except ModelConfigError as error:
    print("ERROR", error)
"""


async def fetch(hub_url: str, cache: Path, revision: str = COMMIT) -> str:
    """In a process of its own: the hub's library reads its endpoint when it is imported."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", FETCH, "hf://org/shapes", revision, str(cache),
        env={**os.environ, "HF_ENDPOINT": hub_url, "HF_HUB_ETAG_TIMEOUT": "3"},  # noqa: TID251
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )  # fmt: skip
    out, _ = await process.communicate()
    return out.decode()


async def test_a_hub_model_is_downloaded_with_progress_and_then_found_in_the_cache(
    hub: Hub, tmp_path: Path
) -> None:
    out = await fetch(hub.url, tmp_path)
    directory = Path(out.partition("DIR ")[2].strip())
    for path in MODEL.iterdir():
        assert (directory / path.name).read_bytes() == path.read_bytes()
    assert not (directory / "training.bin").exists()
    said = [line for line in out.splitlines() if " % of " in line]
    assert said[-1].startswith("SAID downloading org/shapes: 100 % of 7.4 MiB")
    assert all(" % of 7.4 MiB" in line for line in said)  # of all files, from the first one on
    again = await fetch("http://127.0.0.1:9", tmp_path)
    assert again.partition("DIR ")[2].strip() == str(directory)


async def test_an_unknown_revision_says_what_to_check(hub: Hub, tmp_path: Path) -> None:
    out = await fetch(hub.url, tmp_path, revision="f" * 40)
    assert "ERROR --model: hf://org/shapes at revision ffff" in out
    assert "the repository has no such revision; set the revision to one of its commits" in out


@pytest.mark.full  # the hub's library tries again for 20 s
async def test_a_hub_that_cannot_be_reached_is_said(tmp_path: Path) -> None:
    out = await fetch("http://127.0.0.1:9", tmp_path)
    assert f"ERROR --model: hf://org/shapes at revision {COMMIT}: it is not in the cache" in out


def test_a_directory_is_used_where_it_is(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert fetch_model(ModelSource(str(tmp_path)), print) == tmp_path


def test_a_directory_that_is_not_there_is_named() -> None:
    with pytest.raises(ModelConfigError, match="/nowhere is no directory"):
        fetch_model(ModelSource("/nowhere"), print)


def test_a_directory_without_a_model_is_told_what_to_name_instead(tmp_path: Path) -> None:
    with pytest.raises(ModelConfigError, match=r"has no config\.json; name the folder of a model"):
        fetch_model(ModelSource(str(tmp_path)), print)
