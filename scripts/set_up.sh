#!/usr/bin/env bash
# Makes the virtual environment and installs Gapless with all its extras. usage: set_up.sh [VENV]
# PYTHON names the interpreter (default python3, at least 3.11). A stamp in VENV marks success.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=${1:-.venv}
python=${PYTHON:-python3}
# A small CPU build where such a wheel is offered; plain torch would bring several GB of CUDA.
torch_cpu="torch==2.13.0"
# Its interpreter runs the GPU's kernels in tests; torch for the GPU brings a Triton of its own.
triton=""
[ "$(uname -s)" = Linux ] && triton="triton==3.6.0"

say() { printf '== %s\n' "$*"; }
fail() { printf 'setup: %s\n' "$*" >&2; exit 1; }

command -v "$python" >/dev/null || fail "no $python: install Python 3.11 or newer, or name one: make PYTHON=..."
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
  fail "$("$python" -V) is too old: Gapless needs 3.11 or newer. Name another one: make PYTHON=python3.12"
if [ ! -x "$venv/bin/python" ]; then
  say "virtual environment in $venv"
  "$python" -c 'import ensurepip, venv' 2>/dev/null ||
    fail "$python cannot make virtual environments: install the package python3-venv"
  "$python" -m venv "$venv"
fi
pip=("$venv/bin/python" -m pip --disable-pip-version-check install)
# pip's own progress is for people; a log needs only the lines below.
[ -t 1 ] || pip+=(--quiet)
if ! "$venv/bin/python" -c 'import torch' 2>/dev/null; then
  if command -v nvidia-smi >/dev/null && nvidia-smi -L 2>/dev/null | grep -q GPU; then
    say "torch for the GPU (some GB; takes minutes)"
    "${pip[@]}" 'torch>=2.11'
  else
    say "torch for the CPU (about 400 MB with Triton; takes a minute or two)"
    "${pip[@]}" "$torch_cpu" $triton
  fi
fi
say "gapless and its tools"
"${pip[@]}" --editable '.[dev]'
touch "$venv/set-up.stamp"
say "set up in $venv"
