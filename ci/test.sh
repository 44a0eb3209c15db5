#!/usr/bin/env bash
# Installs what the tests need into a virtual environment and runs them all. Can be run again at any time.
#
#   VENV           folder of the environment (default: .venv-test)
#   TORCH_VERSION  default: 2.13.0
#   CI             if set, the Ascend tests fail instead of being skipped if torch_npu's wheel, gcc or binutils are missing
#   WORKERS        tests at a time; default: 2
#   PYTHON, TORCH_INDEX, PACKAGE: see environment.sh; with PACKAGE the tests run outside the checkout, without lint,
#                  format, types and the Ascend tests
# Arguments go to pytest: bash ci/test.sh tests/test_config.py -k warning
# While you work: -m "not slow" leaves out tests that take long and rarely fail; -n 0, which --pdb needs, runs one process.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source ci/environment.sh

VENV=$(realpath -m "${VENV:-.venv-test}")
make_environment "$VENV" "${TORCH_VERSION:-2.13.0}" standalone,tools,test

if [ -z "${PACKAGE:-}" ]; then
    unpack_torch_npu "$VENV" "${TORCH_VERSION:-2.13.0}"
    stage "lint"
    "$VENV/bin/ruff" check .
    stage "format"
    "$VENV/bin/ruff" format --check .
    stage "types"
    "$VENV/bin/mypy"
fi
beside_package "$VENV"
stage "tests ($("$VENV/bin/python" -V), torch $("$VENV/bin/python" -c 'import torch; print(torch.__version__)'))"
# A file stays with one worker: its tests share what a module's fixture made. By default files with few tests, which are
# the slow ones, would come last, and one worker would wait for the other.
"$VENV/bin/python" -m pytest -n "${WORKERS:-2}" --dist loadfile --no-loadscope-reorder "$@"
