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
locks=requirements
compile pyproject.toml $locks/build.in --extra operator -o $locks/operator.txt
compile pyproject.toml $locks/build.in --extra gateway --extra worker --extra tracing -o $locks/worker-cuda.txt
compile pyproject.toml $locks/build.in --extra gateway --extra tracing -c $locks/worker-cuda.txt -o $locks/gateway.txt
compile pyproject.toml $locks/build.in $locks/dev.in --extra operator --extra cli --extra gateway --extra worker --extra tracing -o $locks/dev.txt
# torch for CPUs is not on PyPI: its hashes are in worker-cpu.in, the rest is that of CUDA
python3 tools/cpu_lock.py $locks/worker-cuda.txt $locks/worker-cpu.in $locks/worker-cpu.txt
