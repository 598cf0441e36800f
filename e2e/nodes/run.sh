#!/usr/bin/env bash
# run.sh [--install] [--full] [PYTEST ARGUMENTS]: builds images and programs where they are not cached, then runs
# pytest in network, mount and PID namespaces of its own, with which all that it starts ends.
#   --install  apt-get install what is missing    --full  build the images anew, not one layer on those that are there
set -euo pipefail
cd "$(dirname "$0")/../.."
export PYTHONPATH=e2e
python=$PWD/.venv/bin/python

if [ "${1:-}" = inside ]; then
  shift
  mount -t tmpfs tmpfs /run  # names of network namespaces
  "$python" -m pytest -q -s --no-header -m nodes --real-nodes e2e/nodes "$@"  # a child: this shell reaps what is orphaned
  exit
fi

full=()
while [ $# -gt 0 ]; do
  case $1 in
    --install)
      apt-get update -q
      apt-get install -q -y --no-install-recommends buildah containerd runc containernetworking-plugins iptables \
        conntrack iproute2 mmdebstrap openssl util-linux ;;
    --full) full=(--full) ;;
    *) break ;;
  esac
  shift
done

missing=$("$python" -m nodes.requires)
if [ -n "$missing" ]; then  # each test is skipped, with the reason
  exec "$python" -m pytest -q --no-header -m nodes e2e/nodes "$@"
fi

cache=${XDG_CACHE_HOME:-$HOME/.cache}/triptych/nodes
mkdir -p "$cache"
exec 9>"$cache/lock"
flock -n 9 || { echo "another run has $cache/lock; waiting"; flock 9; }

clean() {  # what namespaces do not take with them; of a run that was killed too
  local tree
  for tree in /sys/fs/cgroup/triptych-nodes /sys/fs/cgroup/*/triptych-nodes; do
    for _ in $(seq 50); do
      [ -d "$tree" ] || break
      find "$tree" -depth -type d -exec rmdir {} + 2>/dev/null || sleep 0.1
    done
  done
  rm -rf "$cache/run"
}
trap clean EXIT
clean

tied=(setpriv --pdeathsig KILL)  # ends with this shell
"$python" -m vlm_local.build
"${tied[@]}" unshare --mount --pid --fork --kill-child --mount-proc nice "$python" -m nodes.images "${full[@]}"
"${tied[@]}" unshare --net --mount --pid --fork --kill-child --mount-proc "$PWD/e2e/nodes/run.sh" inside "$@"
