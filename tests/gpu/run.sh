#!/usr/bin/env bash
# The GPU suite: builds the extension for the GPU that is here, runs tests/gpu, then the benchmark. Installs nothing.
#
#   tests/gpu/run.sh [PYTEST ARGUMENTS]
#   PYTHON=python3 names the interpreter, whose torch and jax have CUDA. TORCH_CUDA_ARCH_LIST, BENCHMARK=0 as you like.
#
# Without a GPU the tests are skipped and counted. Where there is a GPU, what stops the suite from using it is an error,
# and so is a run in which no test passes. What is built goes to build/gpu.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

python=${PYTHON:-python3}
folder=build/gpu
log=$folder/build.log

say() {
  printf 'gpu-test [%3d s]: %s\n' "$SECONDS" "$*"
}

fail() {
  say "FAILED: $*" >&2
  exit 1
}

missing=$("$python" - <<'PYTHON'
from importlib.util import find_spec
print(*(name for name in ("torch", "jax", "numpy", "optax", "ninja", "pytest", "hypothesis") if find_spec(name) is None))
PYTHON
)
# Not by using it: that would build it.
installed='import torch_ext; assert torch_ext._load.find_installed().path'
gpus=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU' || true)
if ((gpus == 0)); then
  say "no GPU: nvidia-smi $(command -v nvidia-smi >/dev/null && echo 'lists none' || echo 'is not there')"
  if [[ -n $missing ]] || ! "$python" -c "$installed" 2>/dev/null; then
    count=$(cat tests/gpu/test_*.py | grep -cE '^ *def test_')
    say "0 passed, $count skipped: there is no GPU, and $python could not load them (${missing:-torch_ext is not built})"
    exit 0
  fi
  exec "$python" -m pytest -q -rs -m gpu tests/gpu "$@"
fi
[[ -z $missing ]] || fail "$python has no $missing. Install it: $python -m pip install $missing"

read -r torch cuda architecture <<<"$("$python" -c '
import torch
seen = torch.cuda.is_available()
print(torch.__version__, torch.version.cuda, ".".join(map(str, torch.cuda.get_device_capability())) if seen else "")
')"
[[ $cuda != None ]] || fail "there is a GPU, but torch $torch of $python is a build without CUDA. Name another: PYTHON=..."
[[ -n $architecture ]] || fail "nvidia-smi lists $gpus GPU(s), but torch $torch (CUDA $cuda) of $python sees none"

mkdir -p "$folder"
export ASYNC_EMB_CUDA=1 TORCH_CUDA_ARCH_LIST=${TORCH_CUDA_ARCH_LIST:-$architecture}
say "building for $TORCH_CUDA_ARCH_LIST with torch $torch (CUDA $cuda)"
if ! "$python" setup.py --quiet build_ext --build-lib "$folder" >"$log" 2>&1; then
  grep -v ' steps done, now ' "$log" | tail -60 >&2
  fail "the build; all of it is in $log"
fi
grep '^async-emb:' "$log" | grep -v ' steps done, now ' || true
"$python" -c "
import sys
from pathlib import Path
sys.path.insert(0, 'tests')
from sanitized_build import copy_packages
copy_packages(Path('$folder').resolve())
"

# tests/conftest.py would choose CPUs. jax must not take the memory that torch needs; both stay for comparison.
export ASYNC_EMB_GPU_SUITE=1 JAX_PLATFORMS=cuda,cpu XLA_PYTHON_CLIENT_PREALLOCATE=false
# Without the current folder, whose packages come without the module that was just built.
export PYTHONSAFEPATH=1 PYTHONPATH=$folder
say 'testing'
"$python" -m pytest -q -rs -p no:cacheprovider -o "pythonpath=$folder ." -m gpu tests/gpu "$@"

if [[ -e benchmarks/gpu.py && ${BENCHMARK:-1} != 0 ]]; then
  say 'measuring'
  # The modules that were just built come first, then the benchmark's own.
  PYTHONPATH=$folder:. "$python" -m benchmarks.gpu --json "$folder/benchmark.json"
fi
say 'passed'
