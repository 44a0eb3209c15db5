#!/usr/bin/env bash
# Checks on Ascend NPUs, in an environment that has torch_npu and this package's requirements, with CANN's set_env.sh
# sourced: the all-to-all of HCCL, then values, times and memory of the kernels and of a whole layer. Installs nothing
# and needs no network. Without an NPU it says so and ends with exit code 0.
#
#   PYTHON  interpreter (default: python3)
#   NPUS    how many NPUs take part (default: all that are visible)
#   OUT     folder for what is written (default: outputs/npu_check)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

PYTHON=${PYTHON:-python3}
OUT=${OUT:-outputs/npu_check}
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}

command -v "$PYTHON" >/dev/null || { echo "error: $PYTHON: not found; set PYTHON" >&2; exit 1; }
# the count, or the reason why there is none
found=$("$PYTHON" - <<'END'
import os
os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
try:
    import torch, torch_npu
    print(torch.npu.device_count() or "torch_npu sees no NPU here")
except Exception as error:
    print(f"torch_npu cannot be imported: {' '.join(str(error).split())}")
END
)
found=$(tail -n 1 <<<"$found")
if ! [[ $found =~ ^[0-9]+$ ]]; then
    echo "skipped: $found"
    exit 0
fi
NPUS=${NPUS:-$found}

mkdir -p "$OUT"
echo "==> environment"
{
    "$PYTHON" -m mindspeed_chunk.tools doctor || true
    command -v npu-smi >/dev/null && npu-smi info || true
    env | grep -E '^(ASCEND|HCCL|TORCH_HCCL|PYTORCH_NPU|TASK_QUEUE|MULTI_STREAM)' | sort || true
} >"$OUT/environment.txt" 2>&1

if [ "$NPUS" -ge 2 ]; then
    echo "==> all-to-all, $NPUS NPUs"
    "$PYTHON" -m torch.distributed.run --standalone --nproc_per_node "$NPUS" ci/wire_check.py --device npu --out "$OUT"
else
    echo "==> all-to-all: skipped, it takes two NPUs"
fi
echo "==> kernels and layer"
"$PYTHON" ci/device_check.py --device npu --out "$OUT"
echo "==> done; a report is the folder $OUT"
