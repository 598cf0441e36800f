"""Runs scripts of Argo CD's resource customizations as Argo CD does.

Argo CD's util/lua opens the libraries base, table and package, and an `os` with `time` and `date`.
It sets the global `obj`, and decodes what the script returns to JSON.
"""

from __future__ import annotations

import copy
from typing import Any

from lupa import lua51

Manifest = dict[str, Any]

HEALTH = ("Unknown", "Progressing", "Suspended", "Healthy", "Degraded", "Missing")
SANDBOX = """
getmetatable("").__index = nil
local safe = { time = os.time, date = os.date }
for name in pairs(package.loaded) do
  if name ~= "_G" and name ~= "package" and name ~= "table" then
    package.loaded[name] = nil
    _G[name] = nil
  end
end
package.loaded.os = safe
package.path, package.cpath, python = "", "", nil
"""


def run(script: str, manifest: Manifest) -> Any:
    """Run a script with the global `obj`; returns its result as JSON.

    Raises:
        lua51.LuaError: the script has an error.
    """
    runtime = lua51.LuaRuntime(register_eval=False, register_builtins=False)
    runtime.execute(SANDBOX)
    runtime.globals()["obj"] = _table(runtime, manifest)
    return _json(runtime.execute(script))


def health(script: str, manifest: Manifest) -> dict[str, str]:
    """Return status and message."""
    found: dict[str, str] = run(script, manifest)
    assert set(found) <= {"status", "message"}
    assert found["status"] in HEALTH
    return found


def discover(script: str, manifest: Manifest) -> list[dict[str, Any]]:
    """Return the actions as `result` of action_test.yaml lists them."""
    found = run(script, manifest)
    return [{"name": name, "disabled": False, **found[name]} for name in sorted(found)]


def act(script: str, manifest: Manifest) -> Manifest:
    """Return the object that an action makes of another one."""
    found: Manifest = _cleaned(run(script, copy.deepcopy(manifest)), manifest)
    return found


def _table(runtime: Any, value: Any) -> Any:
    if isinstance(value, dict):
        pairs = {key: _table(runtime, item) for key, item in value.items() if item is not None}
        return runtime.table_from(pairs)
    if isinstance(value, list):
        return runtime.table_from([_table(runtime, item) for item in value])
    return value


def _json(value: Any) -> Any:
    """Decode as gopher-json does: an empty table is an array."""
    if lua51.lua_type(value) != "table":
        return int(value) if isinstance(value, float) and value.is_integer() else value
    keys = list(value.keys())
    if all(isinstance(key, int) for key in keys):
        assert sorted(keys) == list(range(1, len(keys) + 1)), "a sparse array"
        return [_json(value[key]) for key in sorted(keys)]
    assert all(isinstance(key, str) for key in keys), "a table of mixed keys"
    return {key: _json(value[key]) for key in keys}


def _cleaned(new: Any, old: Any) -> Any:
    """Make empty arrays objects again where the original has an object (cleanReturnedObj)."""
    if isinstance(old, dict) and new == []:
        return {}
    if isinstance(old, dict) and isinstance(new, dict):
        return {key: _cleaned(item, old.get(key)) for key, item in new.items()}
    if isinstance(old, list) and isinstance(new, list):
        kept = [_cleaned(a, b) for a, b in zip(new, old, strict=False)]
        return kept + new[len(kept) :]
    return new
