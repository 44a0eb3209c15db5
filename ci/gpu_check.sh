#!/usr/bin/env bash
# Checks this project on a GPU: values, times, memory; see device_check.py. It needs one GPU, at most 8 minutes, and no
# network. Without a GPU it says so and ends with exit code 0.
#
#   PYTHON  interpreter of an environment with torch for CUDA and this package (default: python)
#   OUT     folder for record.json and trace.json (default: outputs/gpu_check)
# Arguments go to device_check.py: bash ci/gpu_check.sh --gigabytes 25
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
timeout 480 "${PYTHON:-python}" ci/device_check.py --device cuda --out "${OUT:-outputs/gpu_check}" "$@"
