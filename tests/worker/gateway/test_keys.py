"""Which files of a mounted Secret are keys, and what applies if one of them is not."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from vlm_worker.gateway.config import ConfigWatcher

ONE, TWO = "sk-0123456789abcdef", "eyJhbGciOi.J9+/~_-=="
NO_KEYS = {
    "ca.crt": "-----BEGIN CERTIFICATE-----\nMIIBszCCAVmgAwIBAgIUZ\n-----END CERTIFICATE-----\n",
    "meta.json": '{\n  "owner": "x"\n}\n',
    "compact.json": '{"owner":\n"somebody-or-other"}\n',
    "env": f"KEY_OF_ONE={ONE}\nKEY_OF_TWO={ONE}\n",
    "noted": f"# the old one\n{ONE}\n",
    "ruled": f"{ONE}\n--------------------\n{TWO}\n",
    "short": f"{ONE}\n0123456789abcde\n",
    "latin": f"{ONE}\n0123456789abcdef\u00e9\n",
    "spaced": f"{ONE}\n0123456789 abcdef\n",
}


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    directory = tmp_path / "keys"
    directory.mkdir()
    (directory / "team-a").write_text(f"{ONE}\n")
    return directory


def watching(secret: Path) -> ConfigWatcher:
    return ConfigWatcher(None, secret, images_per_request=1)


def tenant_of(watcher: ConfigWatcher, key: str) -> str | None:
    assert watcher.now.keys is not None
    return watcher.now.keys.tenant_of(f"Bearer {key}")


@pytest.mark.parametrize("name", NO_KEYS)
def test_no_line_of_another_file_is_a_key(
    secret: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    (secret / "team-a").write_text(TWO)
    (secret / name).write_text(NO_KEYS[name])
    watcher = watching(secret)
    assert watcher.now.keys is not None
    assert watcher.now.keys.tenants == ("team-a",)
    assert tenant_of(watcher, TWO) == "team-a"
    for line in NO_KEYS[name].splitlines():
        assert tenant_of(watcher, line) in (None, "team-a")
    assert f"keys: {name}: line " in watcher.problem
    for _ in range(3):
        watcher.reload()
    [record] = [one for one in caplog.records if one.levelno == logging.WARNING]
    assert vars(record)["reason"] == watcher.problem
    assert ONE not in watcher.problem


@pytest.mark.parametrize("key", ["k", "two words", "{", "-----x", "s\u00e9cret", "a:b,c"])
def test_a_file_of_one_line_is_a_key_whatever_it_holds(secret: Path, key: str) -> None:
    (secret / "team-b").write_text(f"\n{key}\n")
    watcher = watching(secret)
    known = watcher.now.keys
    assert known is not None
    assert known.tenant_of(f"Bearer {key}".encode().decode("utf-8", "surrogateescape")) == "team-b"
    assert watcher.problem == ""


def test_the_last_keys_of_a_tenant_stay_while_its_file_is_refused(secret: Path) -> None:
    (secret / "team-b").write_text(f"{TWO}\n")
    watcher = watching(secret)
    (secret / "team-b").write_text(f"{TWO}\nshort\n")
    (secret / "team-a").unlink()
    for _ in range(2):
        watcher.reload()
        assert tenant_of(watcher, TWO) == "team-b"
        assert tenant_of(watcher, "short") is None
        assert tenant_of(watcher, ONE) is None, "the other files apply"
        assert "team-b: line 2 of 2" in watcher.problem
    (secret / "team-b").write_text(f"{ONE}\n{TWO}\n")
    watcher.reload()
    assert tenant_of(watcher, ONE) == tenant_of(watcher, TWO) == "team-b"
    assert watcher.problem == ""
    (secret / "team-b").unlink()
    watcher.reload()
    assert tenant_of(watcher, TWO) is None
