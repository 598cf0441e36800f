"""`vlm-worker fetch`: complete and checked, or an error that says who must do what."""

from __future__ import annotations

import asyncio
import errno
import signal
from pathlib import Path

import pytest
from worker.serve import downloads
from worker.serve.downloads import ended
from worker.serve.hub import COMMIT, LARGE, MODEL, Hub

from vlm_worker.core.model_files import ModelConfigError, ModelUnavailableError
from vlm_worker.serve.hub import hub_error, progress_text
from vlm_worker.serve.sources import ModelRecord, fetch_model, read_record, write_record
from vlm_worker.settings import ModelSource

URI = "hf://org/shapes"
NUM_BYTES = sum(path.stat().st_size for path in MODEL.iterdir())


NEEDS_USER = 3


async def fetch(
    hub: Hub, into: Path, *, token: str = "", revision: str = COMMIT, more: tuple[str, ...] = ()
) -> tuple[int, str]:
    """Run the command; return its exit code and standard error."""
    return await ended(await start(hub, into, token=token, revision=revision, more=more))


async def start(
    hub: Hub, into: Path, *, token: str = "", revision: str = COMMIT, more: tuple[str, ...] = ()
) -> asyncio.subprocess.Process:
    env = {"HF_ENDPOINT": hub.url, "HF_HUB_ETAG_TIMEOUT": "3"}
    if token:
        env["HF_TOKEN"] = token
    flags = (f"--model={URI}", f"--model-revision={revision}", f"--into={into}", *more)
    return await downloads.start(*flags, env=env)


async def test_a_model_is_complete_once_fetched_and_is_not_fetched_again(
    hub: Hub, tmp_path: Path
) -> None:
    into = tmp_path / "shapes"
    code, errors = await fetch(hub, into)
    assert code == 0, errors
    for path in MODEL.iterdir():
        assert (into / path.name).read_bytes() == path.read_bytes()
    assert read_record(into) == ModelRecord(URI, COMMIT, complete=True, num_bytes=NUM_BYTES)
    assert fetch_model(ModelSource(str(into)), print) == into
    before = hub.num_requests
    code, errors = await fetch(hub, into)
    assert code == 0
    assert "complete already" in errors
    assert hub.num_requests == before


async def test_a_transfer_that_ends_early_is_tried_again(hub: Hub, tmp_path: Path) -> None:
    hub.num_cuts = 1
    code, errors = await fetch(hub, tmp_path)
    assert code == 0, errors
    assert hub.num_cuts == 0
    assert hub.sent.count(LARGE) == 2
    assert (tmp_path / LARGE).read_bytes() == (MODEL / LARGE).read_bytes()


async def test_damaged_content_is_found_deleted_and_fetched_again(hub: Hub, tmp_path: Path) -> None:
    hub.damaged = True
    code, errors = await fetch(hub, tmp_path)
    assert code == 1
    assert f"{LARGE}: does not have the source's content; run `vlm-worker fetch` again" in errors
    assert not (tmp_path / LARGE).exists()
    with pytest.raises(ModelConfigError, match="has only a part of hf://org/shapes; wait until"):
        fetch_model(ModelSource(str(tmp_path)), print)
    hub.damaged = False
    hub.sent.clear()
    code, errors = await fetch(hub, tmp_path)
    assert code == 0, errors
    assert hub.sent == [LARGE]  # the complete files are kept
    assert fetch_model(ModelSource(str(tmp_path)), print) == tmp_path


async def test_a_gated_model_says_to_accept_the_licence(hub: Hub, tmp_path: Path) -> None:
    hub.gated = True
    code, errors = await fetch(hub, tmp_path, token="t")
    assert code == NEEDS_USER
    assert "the model is gated; accept its licence on the hub" in errors
    assert "model.credentialsSecretRef" in errors


async def test_a_private_model_needs_the_token(hub: Hub, tmp_path: Path) -> None:
    hub.token = "secret"
    code, errors = await fetch(hub, tmp_path / "without")
    assert code == NEEDS_USER
    assert "give a token that may read it (HF_TOKEN" in errors
    code, errors = await fetch(hub, tmp_path / "with", token="secret")
    assert code == 0, errors


async def test_a_directory_of_another_revision_is_kept(hub: Hub, tmp_path: Path) -> None:
    write_record(tmp_path, ModelRecord(URI, "f" * 40, complete=True, num_bytes=1))
    code, errors = await fetch(hub, tmp_path)
    assert code == NEEDS_USER
    assert "name another directory for each model and revision" in errors
    assert hub.num_requests == 0


async def test_a_hub_that_is_away_may_be_tried_again(hub: Hub, tmp_path: Path) -> None:
    hub.down = True
    code, errors = await fetch(hub, tmp_path)
    assert code == 1
    assert "the hub answers 503; wait until the hub works again" in errors


async def test_a_download_that_is_stopped_has_not_succeeded(hub: Hub, tmp_path: Path) -> None:
    hub.stalls = True
    process = await start(hub, tmp_path)
    async with asyncio.timeout(60):
        await hub.stalled.wait()
    process.terminate()
    async with asyncio.timeout(30):
        await process.communicate()
    assert process.returncode == 128 + signal.SIGTERM
    with pytest.raises(ModelConfigError, match="has only a part of"):
        fetch_model(ModelSource(str(tmp_path)), print)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), ModelConfigError),
        (OSError("[SSL: CERTIFICATE_VERIFY_FAILED]"), ModelConfigError),
        (OSError(errno.ECONNREFUSED, "Connection refused"), ModelUnavailableError),
    ],
)
def test_only_errors_that_may_pass_are_worth_another_attempt(
    error: OSError, kind: type[Exception]
) -> None:
    assert type(hub_error(error, ModelSource(URI, COMMIT))) is kind


def test_a_full_volume_is_named() -> None:
    error = OSError(errno.ENOSPC, "No space left on device")
    text = str(hub_error(error, ModelSource(URI, COMMIT, Path("/models/cache"))))
    assert text.endswith("no space is left in /models/cache; use a larger volume or claim")


def test_a_certificate_that_is_not_trusted_says_which_variable_to_set() -> None:
    error = OSError("[SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed")
    text = str(hub_error(error, ModelSource(URI, COMMIT)))
    assert "is not trusted; set SSL_CERT_FILE" in text


def test_progress_has_share_size_rate_and_time_left() -> None:
    gib = 2.0**30
    assert progress_text(4 * gib, 16 * gib, seconds=8) == (
        "25 % of 16.0 GiB at 512.0 MiB/s, 24 s left"
    )
    assert progress_text(0, 16 * gib, seconds=0) == "0 % of 16.0 GiB"
