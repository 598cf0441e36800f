#!/usr/bin/env bash
# test.sh [--full]: every suite in turn, since two heavy things at once starve a small machine.
# Each suite says what it is, how long it took and what it skipped; a failure does not hide later ones.
set -uo pipefail
cd "$(dirname "$0")/.."
marks='not full and not nodes' examples=ci  # the same examples each time
[ "${1:-}" != --full ] || { marks='not nodes'; examples=default; }  # new ones each time
export PYTHONUNBUFFERED=1 TOKENIZERS_PARALLELISM=false
start=$SECONDS; failed=()

suite() {  # suite NAME PATH...
  local name=$1 begun=$SECONDS; shift
  printf '\n\033[1m== %s\033[0m\n' "$name"
  .venv/bin/python -m pytest -q --no-header -m "$marks" --hypothesis-profile="$examples" "$@"
  local status=$?
  [ $status -eq 0 ] || failed+=("$name")
  printf '== %s: %ds\n' "$name" $((SECONDS - begun))
}

printf '\n\033[1m== control plane\033[0m (built once, about 5 minutes, then cached)\n'
.venv/bin/python -m vlm_local.build || { echo "the control plane could not be built; see above"; exit 1; }

suite kernels   tests/kernels
suite worker    tests/worker tests/examples
suite operator  tests/operator tests/helm
suite contracts tests/contracts tests/bench
suite e2e       e2e

printf '\n'
if [ ${#failed[@]} -gt 0 ]; then echo "FAILED: ${failed[*]} (in $((SECONDS - start))s)"; exit 1; fi
echo "all suites passed in $((SECONDS - start))s"
