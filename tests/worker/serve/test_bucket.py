"""`vlm-worker fetch --model=s3://…`: complete and of one state, or an error with the fix."""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from obstore.exceptions import GenericError
from worker.serve import downloads
from worker.serve.bucket import BUCKET, KEY, PREFIX, SECRET, Bucket
from worker.serve.downloads import ended, serving
from worker.serve.hub import LARGE, MODEL

from vlm_worker.core.model_files import ModelConfigError
from vlm_worker.serve.bucket import bucket_error
from vlm_worker.serve.sources import RECORD, ModelRecord, fetch_model, read_record
from vlm_worker.settings import ModelSource

URI = f"s3://{BUCKET}/{PREFIX}"
NUM_BYTES = sum(path.stat().st_size for path in MODEL.iterdir())
NEEDS_USER = 3


@pytest.fixture
async def bucket() -> AsyncIterator[Bucket]:
    found = Bucket()
    async with serving(found.app) as found.url:
        yield found
        found.resume.set()


async def start(
    bucket: Bucket, into: Path, *, uri: str = URI, secret: str = SECRET
) -> asyncio.subprocess.Process:
    env = {
        "AWS_ENDPOINT_URL": bucket.url,
        "AWS_REGION": "us-east-1",
        "AWS_ACCESS_KEY_ID": KEY,
        "AWS_SECRET_ACCESS_KEY": secret,
    }
    return await downloads.start(f"--model={uri}", f"--into={into}", env=env)


async def fetch(
    bucket: Bucket, into: Path, *, uri: str = URI, secret: str = SECRET
) -> tuple[int, str]:
    """Run the command; return its exit code and standard error."""
    return await ended(await start(bucket, into, uri=uri, secret=secret))


def wait_for_bytes(into: Path) -> None:
    """Return once a part of the large file is on disk; no event reports that."""
    deadline = time.monotonic() + 60
    while not any(path.stat().st_size for path in into.glob(f"{LARGE}.*.partial")):
        assert time.monotonic() < deadline


def assert_complete(into: Path) -> None:
    for path in MODEL.iterdir():
        assert (into / path.name).read_bytes() == path.read_bytes()
    assert not list(into.rglob("*.partial"))
    assert fetch_model(ModelSource(str(into)), print) == into


async def test_a_model_is_complete_once_fetched_and_is_not_fetched_again(
    bucket: Bucket, tmp_path: Path
) -> None:
    bucket.objects[f"{PREFIX}/training.bin"] = b"not ours"
    bucket.objects[f"{PREFIX}-other/config.json"] = b"another model"
    bucket.objects[f"{PREFIX}/.triptych-model.json"] = b'{"uri": "another", "complete": true}'
    bucket.objects[f"{PREFIX}/.triptych-objects.json"] = b"{}"
    into = tmp_path / "shapes"
    code, errors = await fetch(bucket, into, uri=f"{URI}/")
    assert code == 0, errors
    assert_complete(into)
    assert not (into / "training.bin").exists()
    assert read_record(into) == ModelRecord(f"{URI}/", "", complete=True, num_bytes=NUM_BYTES)
    assert bucket.lists > 1, "the list was to have several pages"
    before = bucket.lists
    code, errors = await fetch(bucket, into, uri=f"{URI}/")
    assert code == 0
    assert "complete already" in errors
    assert bucket.lists == before


async def test_an_answer_that_ends_early_is_continued(bucket: Bucket, tmp_path: Path) -> None:
    bucket.num_cuts = 1
    code, errors = await fetch(bucket, tmp_path)
    assert code == 0, errors
    assert bucket.num_cuts == 0
    assert_complete(tmp_path)
    firsts = [first for name, first in bucket.sent if name == LARGE]
    assert len(firsts) > 1
    assert firsts[-1] > 0, "the rest alone is asked for again"


async def test_a_fetch_that_was_killed_continues_where_it_ended(
    bucket: Bucket, tmp_path: Path
) -> None:
    bucket.stalls = True
    process = await start(bucket, tmp_path)
    async with asyncio.timeout(60):
        await bucket.stalled.wait()
        await asyncio.to_thread(wait_for_bytes, tmp_path)
    process.send_signal(signal.SIGKILL)
    await process.communicate()
    with pytest.raises(ModelConfigError, match="has only a part of s3://models/team/shapes"):
        fetch_model(ModelSource(str(tmp_path)), print)
    bucket.stalls = False
    bucket.resume.set()
    bucket.sent.clear()
    code, errors = await fetch(bucket, tmp_path)
    assert code == 0, errors
    assert_complete(tmp_path)
    [first] = [first for name, first in bucket.sent if name == LARGE]
    assert first > 0


async def test_an_object_that_changes_meanwhile_is_never_mixed(
    bucket: Bucket, tmp_path: Path
) -> None:
    bucket.changes = True
    code, errors = await fetch(bucket, tmp_path)
    assert code == 1, "another run may succeed"
    assert "an object changed during the download; run `vlm-worker fetch` again" in errors
    code, errors = await fetch(bucket, tmp_path)
    assert code == 0, errors
    assert (tmp_path / LARGE).read_bytes() == bucket.objects[f"{PREFIX}/{LARGE}"]


async def test_a_folder_that_changes_after_a_file_was_fetched_is_not_complete(
    bucket: Bucket, tmp_path: Path
) -> None:
    bucket.changes_last = True
    code, errors = await fetch(bucket, tmp_path)
    assert code == 1, "another run may succeed"
    assert "changed during the download; run `vlm-worker fetch` again" in errors
    assert not bucket.changes_last
    code, errors = await fetch(bucket, tmp_path)
    assert code == 0, errors
    changed = bucket.objects[f"{PREFIX}/config.json"]
    assert (tmp_path / "config.json").read_bytes() == changed


async def test_keys_that_are_refused_say_which_secret_to_give(
    bucket: Bucket, tmp_path: Path
) -> None:
    code, errors = await fetch(bucket, tmp_path, secret="another")
    assert code == NEEDS_USER
    assert "the bucket refuses these credentials; give keys" in errors
    assert "model.credentialsSecretRef" in errors
    assert SECRET not in errors


@pytest.mark.parametrize(
    ("uri", "message"),
    [
        ("s3://other/team/shapes", "there is no such bucket or object; correct the uri"),
        ("s3://models/team/none", "has no config.json; name the repository or folder of a model"),
    ],
)
async def test_a_folder_that_does_not_exist_is_named(
    bucket: Bucket, tmp_path: Path, uri: str, message: str
) -> None:
    code, errors = await fetch(bucket, tmp_path, uri=uri)
    assert code == NEEDS_USER
    assert f"{uri}: {message}" in errors or f"{uri} {message}" in errors


@pytest.mark.parametrize("name", ["models", "credentials", "certificates", "redirect"])
async def test_a_bucket_that_is_down_may_be_tried_again(
    bucket: Bucket, tmp_path: Path, name: str
) -> None:
    bucket.down = True
    code, errors = await fetch(bucket, tmp_path, uri=f"s3://{name}/{name}")
    assert code == 1
    assert "check AWS_ENDPOINT_URL, HTTPS_PROXY, DNS" in errors


async def test_a_store_without_etags_is_refused(bucket: Bucket, tmp_path: Path) -> None:
    bucket.etags = False
    code, errors = await fetch(bucket, tmp_path)
    assert code == NEEDS_USER
    assert "no ETag" in errors
    assert bucket.sent == []


async def test_an_empty_file_is_fetched_alone(bucket: Bucket, tmp_path: Path) -> None:
    key = f"{PREFIX}/merges.txt"
    bucket.objects[key] = b""
    code, errors = await fetch(bucket, tmp_path)
    assert code == 0, errors
    # as after a run that ended before its last file
    (tmp_path / "merges.txt").unlink()
    (tmp_path / RECORD).unlink()
    bucket.sent.clear()
    code, errors = await fetch(bucket, tmp_path)
    assert code == 0, errors
    assert (tmp_path / "merges.txt").read_bytes() == b""
    assert bucket.sent == []


def test_without_keys_the_error_names_the_secret_and_not_the_network() -> None:
    """Its text is that of obstore; no test asks the metadata address itself."""
    text = (
        "Generic S3 error: Error performing PUT http://169.254.169.254/latest/api/token in 5.1s, "
        "after 5 retries - HTTP error: error sending request"
    )
    error = bucket_error(GenericError(text), ModelSource(URI))
    assert type(error) is ModelConfigError, "the Job is not to repeat it"
    assert "there are no credentials; give keys" in str(error)


async def test_a_key_outside_of_the_folder_is_refused(bucket: Bucket, tmp_path: Path) -> None:
    bucket.objects[f"{PREFIX}/../../config.json"] = b"{}"
    code, errors = await fetch(bucket, tmp_path / "into")
    assert code != 0
    assert "--model: s3://models/team/shapes" in errors
    assert not (tmp_path.parent / "config.json").exists()
    assert not (tmp_path / "config.json").exists()


@pytest.mark.parametrize("command", [["serve", URI], ["gateway", f"--model={URI}"]])
async def test_only_fetch_reads_a_bucket(command: list[str]) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "vlm_worker", *command, "--served-name=x",
        stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    _, errors = await process.communicate()
    assert process.returncode == 2
    assert b"name the directory that `vlm-worker fetch` filled" in errors
