#!/usr/bin/env bash
# Runs tests on a copy of the native module built with the address sanitizer, which sees every use of memory that XLA has
# freed. Leaks are not looked for: torch, XLA and Python keep memory until the process ends.
#
#   tests/asan.sh [PYTEST ARGUMENTS]
#   PYTHON=.venv/bin/python names the interpreter, TESTS=tests/jax_bridge/test_nothing_is_lost.py what to run.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python=${PYTHON:-.venv/bin/python}
folder=build/asan
tests=${TESTS:-tests/jax_bridge/test_nothing_is_lost.py tests/jax_bridge/test_interleavings.py}

"$python" tests/sanitized_build.py "$folder" address

# libstdc++ too: the sanitizer looks for the function that throws when it starts, and Python itself does not bring it.
export LD_PRELOAD="$(g++ -print-file-name=libasan.so) $(g++ -print-file-name=libstdc++.so)"
export ASAN_OPTIONS=detect_leaks=0:abort_on_error=1
# Without the current folder, whose packages would come first.
export PYTHONSAFEPATH=1
export PYTHONPATH=$folder

"$python" -c '
import sys
import torch_ext
module = torch_ext.native().__file__
print("testing", module)
sys.exit("/build/asan/" not in module)
'
exec "$python" -m pytest -q -p no:cacheprovider -o "pythonpath=$folder ." $tests "$@"
