#!/usr/bin/env bash
# Checks this project on the NPUs of this machine: the all-to-all of HCCL, values, times, memory; `mindspeed-chunk check`
# says how. It needs an environment with torch_npu and this package's requirements, with CANN's set_env.sh sourced. It
# takes at most 15 minutes, installs nothing and needs no network. Without an NPU it says so and ends with exit code 0.
#
#   PYTHON  interpreter (default: python3)
#   NPUS    how many NPUs take part (default: all that are visible)
#   OUT     folder for the results (default: outputs/npu_check)
# Arguments go to `check`: bash ci/npu_check.sh --tokens 4096
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
PYTHON=${PYTHON:-python3}
command -v "$PYTHON" >/dev/null || { echo "error: $PYTHON: not found; set PYTHON" >&2; exit 1; }
# without CANN, torch_npu would break the import of torch; the check imports it and reports why that fails
export TORCH_DEVICE_BACKEND_AUTOLOAD=0
timeout 900 "$PYTHON" -m mindspeed_chunk.tools check --device npu --out "${OUT:-outputs/npu_check}" \
    ${NPUS:+--ranks "$NPUS"} "$@"
