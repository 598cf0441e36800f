#!/usr/bin/env bash
# env.sh PYTHON: makes .venv with exactly what requirements/dev.txt pins, then the project itself.
set -euo pipefail
cd "$(dirname "$0")/.."
python=$1
say() { printf '\033[1m%s\033[0m\n' "$*"; }

command -v "$python" >/dev/null || { echo "error: $python not found. Triptych needs Python 3.11 or newer; set PYTHON=/path/to/python3.11"; exit 1; }
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
  { echo "error: $("$python" --version) is too old. Triptych needs Python 3.11 or newer; set PYTHON=/path/to/python3.11"; exit 1; }

# A venv that belongs to another path or Python is made anew.
if [ -x .venv/bin/python ] && ! .venv/bin/python -c 'import sys, pathlib; sys.exit(pathlib.Path(sys.prefix) != pathlib.Path(".venv").resolve())'; then
  rm -rf .venv
fi
[ -x .venv/bin/python ] || { say "environment: creating .venv"; "$python" -m venv .venv; }
say "environment: installing pinned packages (the first time about 3 GB to download and 6 GB on disk: PyPI's torch carries CUDA)"
if ! .venv/bin/python -m pip install --disable-pip-version-check --quiet --require-hashes -r requirements/dev.txt; then
  echo "error: packages could not be installed. Is a package index reachable, and is there 10 GB of free disk?"
  echo "       A later 'make env' continues where this one stopped."
  exit 1
fi
.venv/bin/python -m pip install --disable-pip-version-check --quiet --no-deps --no-build-isolation -e .
touch .venv/.ready
