"""Counts the structure of the product code and fails if a count exceeds its limit.

Product code: tracked .py files below worker/vlm_worker (without the generated pb), operator/vlm_*
and kernels/vlm_kernels. Counted:

* lines: newlines, with comments, docstrings and blank lines.
* single importers: modules that exactly one other module of the product imports, at the top or
  inside a function. A package's `__init__` is a module. `from package import name` imports
  `package.name` if that is a module, else `package`. Tests, bench, e2e, examples and tools are no
  importers.
* short files: fewer than 60 lines.

`tools/structure.py --list` prints the modules behind the numbers.
"""

import ast
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

SHORT_LINES = 60
ROOTS = ("worker", "operator", "kernels")
GENERATED = "worker/vlm_worker/pb/"


class Count(NamedTuple):
    """Numbers of one root, or their limits."""

    lines: int
    single_importers: int
    short_files: int


# A commit that lowers a count lowers its limit. If a change needs more, its commit raises the limit
# and says why.
LIMITS = {
    "worker": Count(lines=56_900, single_importers=64, short_files=29),
    "operator": Count(lines=41_900, single_importers=54, short_files=34),
    "kernels": Count(lines=7_900, single_importers=15, short_files=8),
}


def module_of(name: str) -> str:
    """`operator/vlm_operator/plan/__init__.py` is `vlm_operator.plan`."""
    return name.split("/", 1)[1].removesuffix(".py").replace("/", ".").removesuffix(".__init__")


def imports_of(module: str, *, is_package: bool, text: str) -> Iterator[tuple[str, ...]]:
    """For each import of `text` the names that it may mean, most specific first."""
    package = module if is_package else module.rpartition(".")[0]
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from ((alias.name,) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parts = package.split(".")
            above = parts[: len(parts) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            yield from ((f"{base}.{alias.name}", base) for alias in node.names)


def importers(files: dict[str, str]) -> dict[str, set[str]]:
    """Module to the other modules that import it, for `files` (name to text)."""
    modules = {module_of(name): name for name in files}
    found: dict[str, set[str]] = defaultdict(set)
    for module, name in modules.items():
        is_package = name.endswith("/__init__.py")
        for candidates in imports_of(module, is_package=is_package, text=files[name]):
            target = next((one for one in candidates if one in modules), module)
            if target != module:
                found[target].add(module)
    return found


def product() -> dict[str, str]:
    """Name to text of every file of the product."""
    patterns = [f"{root}/vlm_*/**.py" for root in ROOTS]
    listed = subprocess.run(
        ["git", "ls-files", *patterns], capture_output=True, text=True, check=True
    )
    return {
        name: Path(name).read_text()
        for name in listed.stdout.splitlines()
        if not name.startswith(GENERATED) and Path(name).exists()
    }


def main() -> int:
    """Print a line per root and check its limits; returns the exit status."""
    files = product()
    known = importers(files)
    failed = False
    for root, limit in LIMITS.items():
        own = {
            name: text.count("\n") for name, text in files.items() if name.startswith(f"{root}/")
        }
        single = [name for name in own if len(known[module_of(name)]) == 1]
        short = [name for name, lines in own.items() if lines < SHORT_LINES]
        count = Count(sum(own.values()), len(single), len(short))
        print(f"{root}: {len(own)} modules")
        for what, value, most in zip(Count._fields, count, limit, strict=True):
            print(f"  {what} {value}, limit {most}{'  too many' if value > most else ''}")
            failed |= value > most
        if "--list" in sys.argv:
            for name in single:
                print(f"  {name} is imported by {min(known[module_of(name)])}")
            for name in short:
                print(f"  {name} has {own[name]} lines")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
