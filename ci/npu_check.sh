#!/usr/bin/env bash
# Checks this project on the NPUs of this machine: see device_check.sh. It needs an environment with torch_npu and this
# package's requirements, with CANN's set_env.sh sourced.
#
#   PYTHON  interpreter (default: python3)
#   NPUS    how many NPUs take part (default: all that are visible)
#   OUT     folder for the results (default: outputs/npu_check)
# Options of bench and trace can be added: bash ci/npu_check.sh --tokens 4096
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. ci/device_check.sh
PYTHON=${PYTHON:-python3} OUT=${OUT:-outputs/npu_check}
# without CANN, torch_npu would break the import of torch; the check imports it and reports why that fails
export TORCH_DEVICE_BACKEND_AUTOLOAD=0
check_device npu ${NPUS:+--ranks "$NPUS"} "$@"
