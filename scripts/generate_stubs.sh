#!/usr/bin/env bash
# Regenerates the committed stubs under protos/ from the .proto files. usage: generate_stubs.sh [OUT_ROOT]
# OUT_ROOT (default: src) receives gapless/protos/*_pb2*.py; a test compares a fresh run with the tree.
set -euo pipefail
cd "$(dirname "$0")/.."
out=${1:-src}
python -m grpc_tools.protoc -I src --python_out="$out" --grpc_python_out="$out" \
  --mypy_out="$out" --mypy_grpc_out="$out" \
  src/gapless/protos/inference.proto src/gapless/protos/admin.proto
