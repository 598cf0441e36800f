"""A container sees its own mounts and processes, with root and without."""

import json
import os
import shutil
import socket
import subprocess
from pathlib import Path

import pytest

from vlm_local.agent.process import SANDBOX

NOBODY = 65534
SYSTEM_PYTHON = next(
    (found for found in ("/usr/bin/python3", "/usr/local/bin/python3") if Path(found).exists()),
    None,
)


@pytest.fixture(params=["as we are", "without root"])
def user(request: pytest.FixtureRequest) -> list[str]:
    """What to put before a command to run it as the user."""
    if request.param == "as we are":
        return []
    if os.geteuid() or SYSTEM_PYTHON is None or shutil.which("setpriv") is None:
        pytest.skip("needs root, setpriv and a Python that everybody may run")
    return ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"]


def run(prefix: list[str], folder: Path, script: str, **spec) -> tuple[int, str, dict]:
    """Run a shell script in a sandbox; return exit code, output, and what was reported."""
    for name in ("stage", "volume"):
        (folder / name).mkdir(exist_ok=True)
    for path in [folder, *folder.parents]:
        if path == Path("/tmp"):
            break
        path.chmod(path.stat().st_mode | 0o055)
    if prefix:
        for path in folder.rglob("*"):
            os.chown(path, NOBODY, NOBODY)
    (folder / "sandbox.py").write_bytes(SANDBOX.read_bytes())
    ours, theirs = socket.socketpair()
    ours.shutdown(socket.SHUT_WR)  # nobody here needs the pid
    file = folder / "spec.json"
    file.write_text(
        json.dumps(
            {
                "argv": ["sh", "-c", script],
                "env": {"PATH": "/usr/bin:/bin"},
                "cwd": "/",
                "stage": str(folder / "stage"),
                "mounts": [],
                "read_only": False,
                "cgroups": [],
                "agent": os.getpid(),
                "report": theirs.fileno(),
                **spec,
            }
        )
    )
    ended = subprocess.run(
        [*prefix, SYSTEM_PYTHON or "python3", "-I", "-S", str(folder / "sandbox.py"), str(file)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        pass_fds=(theirs.fileno(),),
        check=False,
    )
    theirs.close()
    with ours, ours.makefile() as report:
        said = report.read()
    return ended.returncode, ended.stdout, json.loads(said) if said else {}


def test_it_is_process_one_and_its_exit_code_is_kept(user: list[str], tmp_path: Path):
    code, output, report = run(user, tmp_path, "echo $$; exit 7")
    assert (code, output) == (7, "1\n")
    assert report["pid"] > 1


def test_a_mount_path_that_the_machine_lacks_is_made_for_it_alone(user: list[str], tmp_path: Path):
    (tmp_path / "volume").mkdir()
    (tmp_path / "volume" / "file").write_text("seen")
    deep = "/made/for/the/test"
    mount = {"source": str(tmp_path / "volume"), "path": deep, "read_only": True}
    code, output, _ = run(
        user, tmp_path, f"cat {deep}/file; touch {deep}/x 2>/dev/null || exit 9", mounts=[mount]
    )
    assert (code, output) == (9, "seen")
    assert not Path("/made").exists()


def test_a_mount_under_a_folder_that_exists_hides_no_neighbour(user: list[str], tmp_path: Path):
    mount = {"source": str(tmp_path / "volume"), "path": "/etc/made/here", "read_only": False}
    code, output, _ = run(
        user, tmp_path, "test -d /etc/made/here && cat /etc/passwd | head -c 4", mounts=[mount]
    )
    assert (code, output) == (0, "root")
    assert not Path("/etc/made").exists()


def test_a_read_only_root_refuses_writes_and_its_mounts_take_them(user: list[str], tmp_path: Path):
    mount = {"source": str(tmp_path / "volume"), "path": "/writable", "read_only": False}
    script = "touch /writable/ok && echo yes; touch /etc/no 2>/dev/null || echo no"
    code, output, _ = run(user, tmp_path, script, mounts=[mount], read_only=True)
    assert (code, output) == (0, "yes\nno\n")
    assert (tmp_path / "volume" / "ok").exists()


@pytest.mark.parametrize(
    ("spec", "problem"),
    [
        ({"argv": ["no-such-program"]}, "No such file"),
        ({"cwd": "/no/such/folder"}, "No such file"),
        ({"mounts": [{"source": "/no/source", "path": "/x", "read_only": False}]}, "mount"),
    ],
)
def test_what_cannot_start_says_why(spec: dict, problem: str, tmp_path: Path):
    code, _, report = run([], tmp_path, "true", **spec)
    assert code == 128
    assert problem in report["error"]


def test_processes_that_it_leaves_running_end_with_it(user: list[str], tmp_path: Path):
    marker = f"left-by-{tmp_path.name}"
    _, seen, _ = run(user, tmp_path, f"sh -c 'sleep 600; : {marker}' & ps -eo args")
    assert f": {marker}" in seen
    listed = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True)
    assert f": {marker}" not in listed.stdout


def test_a_uid_that_it_is_given_has_no_name_and_opens_what_the_agent_opens(
    user: list[str], tmp_path: Path
):
    naming = "id -un >/dev/null 2>&1 || echo nobody"
    script = f"id -u; id -g; {naming}; umask 077; echo x > /v/own; cat /v/own"
    (tmp_path / "volume").mkdir()
    mounts = [{"source": str(tmp_path / "volume"), "path": "/v", "read_only": False}]
    code, output, report = run(user, tmp_path, script, mounts=mounts, user=[65532, 65531])
    assert (code, output.split()) == (0, ["65532", "65531", "nobody", "x"]), report


def test_a_uid_has_no_capability_left(user: list[str], tmp_path: Path):
    script = "grep CapEff /proc/self/status; chroot / true 2>/dev/null || echo refused"
    _, output, _ = run(user, tmp_path, script, user=[65532, 65532])
    assert output.split() == ["CapEff:", "0" * 16, "refused"]
