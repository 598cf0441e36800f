"""The volumes of a pod never hide the code of its image."""

from pathlib import Path

from vlm_local.agent.process import Bind
from vlm_local.agent.runs import code_folders, keep_code


def test_code_below_a_mount_path_is_shown_again_read_only(tmp_path: Path):
    volume = tmp_path / "volume"
    volume.mkdir()
    code = tmp_path / "tmp" / "checkout" / ".venv"
    code.mkdir(parents=True)
    scratch = Bind(volume, str(tmp_path / "tmp"))

    kept = keep_code([scratch], [code, Path("/usr")])

    assert kept == [scratch, Bind(code, str(code), read_only=True)]
    assert (volume / "checkout" / ".venv").is_dir()


def test_a_folder_inside_one_that_is_shown_needs_no_place_of_its_own(tmp_path: Path):
    scratch = Bind(tmp_path, "/data")
    kept = keep_code([scratch], [Path("/data/code"), Path("/data/code/lib")])
    assert [bind.path for bind in kept] == ["/data", "/data/code"]


def test_nothing_is_added_where_nothing_is_hidden(tmp_path: Path):
    binds = [Bind(tmp_path, "/somewhere/else")]
    assert keep_code(binds, code_folders()) == binds
