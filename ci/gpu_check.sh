#!/usr/bin/env bash
# Checks this project on the GPUs of this machine: see device_check.sh.
#
#   PYTHON  interpreter of an environment with torch for CUDA and this package (default: python)
#   OUT     folder for the results (default: outputs/gpu_check)
# Options of bench and trace can be added: bash ci/gpu_check.sh --ranks 4
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. ci/device_check.sh
PYTHON=${PYTHON:-python} OUT=${OUT:-outputs/gpu_check}
check_device cuda "$@"
