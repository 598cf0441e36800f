#!/usr/bin/env bash
# Writes requirements/*.txt: exact versions with hashes and no URLs. Needs uv.
set -euo pipefail
cd "$(dirname "$0")/.."
command -v uv >/dev/null || { echo "error: uv not found; install it (pip install uv)"; exit 1; }
# Nothing younger than a week gets in: poisoned releases are usually found within days.
newest=$(date -u -d "8 days ago" +%Y-%m-%d)
compile() {
  uv pip compile --quiet --exclude-newer "$newest" --generate-hashes --python-version 3.11 --no-emit-index-url --no-header --no-annotate "$@"
}
compile pyproject.toml requirements/build.in --extra operator -o requirements/operator.txt
compile pyproject.toml requirements/build.in --extra worker -o requirements/worker.txt
compile pyproject.toml requirements/build.in requirements/dev.in --extra operator --extra cli --extra worker -o requirements/dev.txt
