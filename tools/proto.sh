#!/usr/bin/env bash
# proto.sh: writes worker/vlm_worker/pb from worker/proto. Messages only: wire/methods.py reads the services
# from the descriptors, so there is no generated gRPC code.
set -euo pipefail
cd "$(dirname "$0")/.."
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT
.venv/bin/python -m grpc_tools.protoc --proto_path=worker/proto --python_out="$out" --pyi_out="$out" \
  vlm/v1/worker.proto
cp "$out"/vlm/v1/worker_pb2.py "$out"/vlm/v1/worker_pb2.pyi worker/vlm_worker/pb/
