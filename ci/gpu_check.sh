#!/usr/bin/env bash
# Checks this project on the GPUs of this machine: values, times, memory; `mindspeed-chunk check` says how. It takes at
# most 15 minutes and needs no network. Without a GPU it says so and ends with exit code 0.
#
#   PYTHON  interpreter of an environment with torch for CUDA and this package (default: python)
#   OUT     folder for the results (default: outputs/gpu_check)
# Arguments go to `check`: bash ci/gpu_check.sh --ranks 4
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
timeout 900 "${PYTHON:-python}" -m mindspeed_chunk.tools check --device cuda --out "${OUT:-outputs/gpu_check}" "$@"
