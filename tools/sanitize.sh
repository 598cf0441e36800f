#!/usr/bin/env bash
# sanitize.sh [PYTEST ARGS]: the kernels' tests on libraries that check every address and integer; a finding ends the run.
# Four minutes on two cores, the compilation included; needs g++ with its libasan and libubsan. These libraries have a name of their own in the cache.
set -euo pipefail
cd "$(dirname "$0")/.."
compiler=${CXX:-g++}
export CXXFLAGS="-fsanitize=address,undefined -fno-sanitize-recover=undefined -g"
# what Python itself never frees is no leak of ours
export ASAN_OPTIONS=detect_leaks=0
command -v "$compiler" >/dev/null || { echo "error: $compiler not found; install g++, or set CXX"; exit 1; }
preload=
for name in libasan.so libubsan.so; do
  library=$("$compiler" -print-file-name=$name)  # the bare name where there is none
  [ -f "$library" ] || { echo "error: $compiler has no $name; install its sanitizers (Debian: libgcc-*-dev)"; exit 1; }
  preload+="$library "
done
# the sanitizers come first into the process, before Python's own libraries
export LD_PRELOAD=$preload
# left out: what has no C++ in it; processes whose memory is bounded, in which no sanitizer starts; and an
# allocation that must fail, since the sanitizer ends the process where `new` throws
exec .venv/bin/python -m pytest -q --no-header -m "not full" tests/kernels tests/worker/media/test_resize.py \
  --ignore=tests/kernels/test_native.py --ignore=tests/kernels/gpu --ignore=tests/kernels/test_no_memory.py \
  --deselect=tests/worker/media/test_resize.py::test_a_child_that_is_told_of_the_library_makes_the_patches_of_one_that_is_not \
  --deselect=tests/worker/media/test_resize.py::test_the_library_changes_no_patches_wherever_they_are_cut \
  --deselect=tests/worker/media/test_resize.py::test_an_image_that_memory_is_bounded_for_is_an_error_and_ends_no_process "$@"
