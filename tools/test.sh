#!/usr/bin/env bash
# test.sh [--full]: every suite. Suites that wait for processes, servers or a cluster run one after
# another, since two of them starve a small machine. Suites that only compute run beside them at the
# lowest priority, in the processor time that is left; their output follows at the end. Each suite
# says what it is, how long it took and what it skipped; a failure does not hide later ones.
set -uo pipefail
cd "$(dirname "$0")/.."
marks='not full and not nodes' examples=ci full=  # the same examples each time
[ "${1:-}" != --full ] || { marks='not nodes'; examples=default; full=1; }  # new ones each time
export PYTHONUNBUFFERED=1 TOKENIZERS_PARALLELISM=false
COMPUTING=(tests/operator/{autoscale,simulate,reconcile,status})
start=$SECONDS
results=$(mktemp -d) beside=none
trap 'kill -- "-$beside" 2>/dev/null; rm -rf "$results"' EXIT

suite() {  # suite NAME PYTEST_ARGUMENT...
  local name=$1 begun=$SECONDS; shift
  printf '\n\033[1m== %s\033[0m\n' "$name"
  .venv/bin/python -m pytest -q --no-header -m "$marks" --hypothesis-profile="$examples" "$@" || echo "$name" >> "$results/failed"
  printf '== %s: %ds\n' "$name" $((SECONDS - begun))
}

computing() {  # a test gets little processor time for a while, and so more time
  renice -n 19 -p "$BASHPID" > /dev/null
  suite kernels   -p no:cacheprovider --timeout=900 tests/kernels
  suite decisions -p no:cacheprovider --timeout=900 "${COMPUTING[@]}"
}

printf '\n\033[1m== control plane\033[0m (built once, about 5 minutes, then cached)\n'
.venv/bin/python -m vlm_local.build || { echo "the control plane could not be built; see above"; exit 1; }
if [ -n "$full" ]; then  # without them, make test skips what needs them
  printf '\n\033[1m== prometheus\033[0m (built once, about 10 minutes, then cached)\n'
  PYTHONPATH=operator .venv/bin/python tools/prometheus.py || exit 1
fi
.venv/bin/python -c 'from vlm_kernels.cpu import native; native.library()'  # compiled once, then cached

set -m  # a process group of its own, which ends with this script
computing > "$results/output" 2>&1 &
beside=$!
set +m
suite worker    tests/worker tests/examples
suite operator  tests/operator tests/helm "${COMPUTING[@]/#/--ignore=}"
suite contracts tests/contracts tests/bench tests/monitoring tests/gitops
suite e2e       e2e
wait
cat "$results/output"

printf '\n'
if [ -s "$results/failed" ]; then echo "FAILED: $(paste -sd ' ' "$results/failed") (in $((SECONDS - start))s)"; exit 1; fi
echo "all suites passed in $((SECONDS - start))s"
