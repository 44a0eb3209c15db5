#!/usr/bin/env bash
# Qwen3.5-35B-A3B with Chunk MoE on the 16 NPUs of this machine. Start it in the root of a MindSpeed-MM checkout:
#   bash .../examples/qwen3_5_35b/run.sh [CONFIG.yaml]       (default: qwen3_5_35b_npu.yaml next to this file)
# 在 MindSpeed-MM 代码仓根目录下执行；默认使用本文件同目录下的 qwen3_5_35b_npu.yaml。
#
#   CANN             set_env.sh of CANN (default: /usr/local/Ascend/cann/set_env.sh)
#   NPUS_PER_NODE, NNODES, NODE_RANK, MASTER_ADDR, MASTER_PORT: as for torchrun (default: one machine with 16)
set -eo pipefail
CONFIG=${1:-$(dirname "${BASH_SOURCE[0]}")/qwen3_5_35b_npu.yaml}
CANN=${CANN:-/usr/local/Ascend/cann/set_env.sh}
TRAINER=mindspeed_mm/fsdp/train/trainer.py
NNODES=${NNODES:-1}
NPUS_PER_NODE=${NPUS_PER_NODE:-16}

for file in "$CONFIG" "$CANN" "$TRAINER"; do
    [ -f "$file" ] || { echo "error: $file: no such file; the argument, CANN or the current folder is wrong" >&2; exit 1; }
done
source "$CANN"
export NON_MEGATRON=true
export MULTI_STREAM_MEMORY_REUSE=2
export TASK_QUEUE_ENABLE=2
export ASCEND_LAUNCH_BLOCKING=0
export ACLNN_CACHE_LIMIT=100000
export CPU_AFFINITY_CONF=1
export PYTORCH_NPU_ALLOC_CONF=expandable_segments:True

mkdir -p logs
LOG=logs/train_$(date +%Y%m%d_%H%M%S).log
torchrun --nproc_per_node "$NPUS_PER_NODE" --nnodes "$NNODES" --node_rank "${NODE_RANK:-0}" \
    --master_addr "${MASTER_ADDR:-localhost}" --master_port "${MASTER_PORT:-6000}" \
    "$TRAINER" "$CONFIG" 2>&1 | tee "$LOG"

# the mean of steps 101 to 200, as the stock script has it
awk -F'|' '/elapsed time per iteration/ {
    for (i = 1; i <= NF; i++) {
        split($i, field, /: */)
        if ($i ~ /elapsed time per iteration/) step = field[2]
        if ($i ~ /global batch size/) batch = field[2]
    }
    if (++n > 100 && n <= 200) { sum += step; counted++ }
}
END {
    if (!counted) { print "Fewer than 101 steps: no mean step time."; exit }
    printf "Elapsed Time Per iteration (ms): %.1f\n", sum / counted
    printf "Average Samples per Second: %.3f\n", batch * 1000 * counted / sum
}' "$LOG" | tee -a "$LOG"
