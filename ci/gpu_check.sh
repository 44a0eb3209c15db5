#!/usr/bin/env bash
# What this project does on a GPU: values, times, memory; see device_check.py. One GPU, at most 8 minutes, no network.
# Without one it says so and ends with 0.
#
#   PYTHON  interpreter of an environment with torch for CUDA and this package (default: python)
#   OUT     folder for record.json and trace.json (default: outputs/gpu_check)
# Arguments go to device_check.py: bash ci/gpu_check.sh --gigabytes 25
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
timeout 480 "${PYTHON:-python}" ci/device_check.py --device cuda --out "${OUT:-outputs/gpu_check}" "$@"
