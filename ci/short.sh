#!/usr/bin/env bash
# A short set of tests, for a Python on which CI does not run all of them. With Python 3.12 or later it also prints which
# lines ran, in the tests' own processes.
#
#   VENV           folder of the environment (default: .venv-short)
#   TORCH_VERSION  default: 2.13.0
#   PYTHON, TORCH_INDEX: see environment.sh
# Arguments go to pytest, in place of the short set.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source ci/environment.sh

VENV=$(realpath -m "${VENV:-.venv-short}")
at_least() { "${PYTHON:-python3}" -c "import sys; sys.exit(sys.version_info < (3, $1))"; }

extras=tools,test cover=()
short=(tests/test_{config,consistency,files,keys,names,yaml_text}.py
    tests/moe/test_moe_{activation,dispatch,layer,plan,replay,schedule}.py tests/ops
    tests/planner/test_planner_{layout,refusals}.py)
if at_least 11; then # transformers needs it
    extras=standalone,$extras
    export BENCHMARKS=1 # the scripts of benchmarks/ are tested here alone
    short+=(tests/test_benchmarks.py tests/test_{autoload,command}.py tests/lint tests/planner/test_planner.py)
fi
at_least 12 && cover=(--cov=mindspeed_chunk --cov-report=term:skip-covered) # cheap from 3.12 on
make_environment "$VENV" "${TORCH_VERSION:-2.13.0}" "$extras"
[ $# != 0 ] || set -- "${short[@]}"
stage "tests ($("$VENV/bin/python" -V))"
COVERAGE_CORE=sysmon "$VENV/bin/python" -m pytest -q -n 2 --dist loadfile "${cover[@]}" "$@"
