"""The checks in tools/ find violations."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

TOOLS = Path(__file__).parents[2] / "tools"


def tool(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"tools_{name}", TOOLS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_retired_term_is_found_as_a_whole_word_in_its_files():
    terms = tool("terms")
    table = terms.read("# comment\nroom => buffer | only worker/* | allowed worker/old.py\n")
    text = "a mushroom\nthe room\nrooms and room_of\n"
    files = {"worker/a.py": text, "worker/old.py": text, "docs/a.md": text}
    assert list(terms.matches(table, files)) == ["worker/a.py:2: room is now buffer"]


def test_a_retired_term_can_be_a_regular_expression():
    terms = tool("terms")
    table = terms.read("re:\\bvlm_(?!cli_)\\w+_total => triptych_..._total\n")
    found = list(terms.matches(table, {"a.md": "vlm_cli_total\n`vlm_ttft_total`\n"}))
    assert found == ["a.md:2: vlm_ttft_total is now triptych_..._total"]


def test_a_line_without_a_replacement_is_an_error():
    with pytest.raises(ValueError, match="room"):
        tool("terms").read("room\n")


def test_importers_are_counted_through_packages_and_relative_imports():
    files = {
        "worker/vlm_worker/__init__.py": "",
        "worker/vlm_worker/a.py": "from vlm_worker.core import b, c\n",
        "worker/vlm_worker/core/__init__.py": "c = 1\n",
        "worker/vlm_worker/core/b.py": "def f():\n    from . import d\n",
        "worker/vlm_worker/core/d.py": "import vlm_worker.a\n",
    }
    assert tool("structure").importers(files) == {
        "vlm_worker.core.b": {"vlm_worker.a"},
        "vlm_worker.core": {"vlm_worker.a"},
        "vlm_worker.core.d": {"vlm_worker.core.b"},
        "vlm_worker.a": {"vlm_worker.core.d"},
    }


def test_each_suite_is_fast_or_excluded_with_a_reason():
    fast = tool("test_fast")
    root = TOOLS.parent
    assert all((root / path).is_dir() and reason for path, reason in fast.LEFT_OUT.items())
    chosen = set(fast.suites(root))
    assert "tests/worker/core" in chosen
    assert not {path for path in chosen if path.startswith(tuple(fast.LEFT_OUT))}
