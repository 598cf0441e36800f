"""Where the local cluster looks for a folder of its own."""

import pwd
from pathlib import Path

import pytest

from vlm_local.errors import StartError
from vlm_local.settings import LocalSettings


@pytest.fixture
def no_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process's uid has no entry in the user database, as in most containers."""

    def refuse(uid: int) -> None:
        raise KeyError(f"getpwuid(): uid not found: {uid}")

    monkeypatch.setattr(pwd, "getpwuid", refuse)
    monkeypatch.delenv("HOME", raising=False)


@pytest.mark.usefixtures("no_name")
def test_a_user_without_a_name_and_a_home_is_told_what_to_set():
    with pytest.raises(StartError, match="HOME is not set") as told:
        LocalSettings.read({})
    assert "XDG_CACHE_HOME" in told.value.remedy


@pytest.mark.usefixtures("no_name")
def test_either_variable_is_enough():
    assert LocalSettings.read({"HOME": "/h"}).cache == Path("/h/.cache/triptych")
    assert LocalSettings.read({"XDG_CACHE_HOME": "/c"}).cache == Path("/c/triptych")
