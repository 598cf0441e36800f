#!/usr/bin/env bash
# generated.sh [--check] [crds|proto|boards]: writes what is generated; with --check fails where that changes anything.
set -euo pipefail
cd "$(dirname "$0")/.."
check=; what=all
for argument in "$@"; do
  case $argument in --check) check=1 ;; *) what=$argument ;; esac
done
files=(crds helm/triptych/{crd-files,boards} install.yaml docs/api.md worker/vlm_worker/pb)
state() { find "${files[@]}" -type f ! -name '*.pyc' 2>/dev/null | sort | xargs -r sha256sum; }
[ -z "$check" ] || before=$(state)
if [ "$what" = all ] || [ "$what" = crds ]; then tools/crds.sh; fi
if [ "$what" = all ] || [ "$what" = boards ]; then .venv/bin/python tools/boards.py helm/triptych/boards; fi
if [ "$what" = all ] || [ "$what" = proto ]; then tools/proto.sh; fi
if [ -n "$check" ]; then
  after=$(state)
  if [ "$before" != "$after" ]; then
    diff <(echo "$before") <(echo "$after") | sed -n 's/^> [0-9a-f]*  /changed: /p'
    echo "generated files were stale; they are written now: commit them (make generate)"
    exit 1
  fi
fi
