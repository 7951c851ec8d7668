#!/usr/bin/env bash
# Builds the whole extension with CUDA, warnings as errors, loads it, and reads its machine code. Needs no GPU.
#
#   tests/cuda/check.sh [ARCHITECTURES]     9.0, for example; all that a build makes by default if none is named
#   PYTHON=.venv-cuda/bin/python names the interpreter, which has a torch with CUDA.
#
# What is built goes to build/cuda: the module that is installed stays as it is.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

python=${PYTHON:-.venv-cuda/bin/python}
folder=build/cuda
log=$folder/build.log
mkdir -p "$folder"

say() {
  printf 'cuda-check [%3d s]: %s\n' "$SECONDS" "$*"
}

read -r torch cuda <<<"$("$python" -c 'import torch; print(torch.__version__, torch.version.cuda)')"

# nvcc of the machine, or else from the package index, into the virtual environment.
find_nvcc() {
  "$python" torch_ext/cuda_toolkit.py home "$torch" "$cuda" 2>"$folder/nvcc.log"
}
if ! home=$(find_nvcc); then
  say "$(head -1 "$folder/nvcc.log")"
  read -ra packages <<<"$("$python" torch_ext/cuda_toolkit.py packages "$cuda")"
  say "installing ${packages[*]}"
  if ! "$python" -m pip install --quiet --no-cache-dir --no-compile "${packages[@]}" || ! home=$(find_nvcc); then
    cat "$folder/nvcc.log"
    say 'SKIPPED: nothing was built or read, because there is no nvcc for this torch, and none could be installed'
    exit 0
  fi
fi

if (($# == 0)); then
  read -ra architectures <<<"$("$python" torch_ext/cuda_toolkit.py architectures)"
  set -- "${architectures[@]}"
fi
# PTX of each, to read what the machine code was made of.
TORCH_CUDA_ARCH_LIST=$(printf '%s+PTX;' "$@")
export TORCH_CUDA_ARCH_LIST ASYNC_EMB_CUDA=1 ASYNC_EMB_WERROR=1

say "building for $* with torch $torch and the toolkit in $home"
if ! "$python" setup.py --quiet build_ext --build-lib "$folder" >"$log" 2>&1; then
  grep -v ' steps done, now ' "$log" | tail -60 >&2
  say "FAILED: the build; all of it is in $log" >&2
  exit 1
fi
grep '^async-emb:' "$log" | grep -v ' steps done, now ' || true
module=$(echo "$folder"/torch_ext/_C.*.so)

say 'loading the module'
"$python" -c "
import sys
from pathlib import Path
sys.path.insert(0, 'tests')
from sanitized_build import copy_packages
copy_packages(Path('$folder').resolve())
"
# Without the current folder, whose package would come first.
CUDA_VISIBLE_DEVICES='' PYTHONSAFEPATH=1 PYTHONPATH=$folder "$python" -c "
import torch_ext
torch_ext.require_cuda()
print(torch_ext.native().__file__, torch_ext.build_info())
"

say 'reading the machine code'
cuobjdump=$("$python" -c '
import importlib.util, pathlib
print(pathlib.Path(importlib.util.find_spec("triton").origin).parent / "backends/nvidia/bin/cuobjdump")
')
names=()
for architecture; do
  names+=("sm_${architecture//./}")
done
"$python" -m tests.cuda.kernel_rules "$module" "$cuobjdump" "${names[@]}"
say 'passed'
