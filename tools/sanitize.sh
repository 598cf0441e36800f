#!/usr/bin/env bash
# sanitize.sh [PYTEST ARGS]: the kernels' tests on libraries that check every address and integer; a finding ends the run.
# About ten times as slow; needs g++ with its libasan and libubsan. These libraries have a name of their own in the cache.
set -euo pipefail
cd "$(dirname "$0")/.."
compiler=${CXX:-g++}
export CXXFLAGS="-fsanitize=address,undefined -fno-sanitize-recover=undefined -g"
# what Python itself never frees is no leak of ours
export ASAN_OPTIONS=detect_leaks=0
# the sanitizers come first into the process, before Python's own libraries
export LD_PRELOAD="$("$compiler" -print-file-name=libasan.so) $("$compiler" -print-file-name=libubsan.so)"
exec .venv/bin/python -m pytest -q --no-header -m "not full" tests/kernels --ignore=tests/kernels/test_native.py "$@"
