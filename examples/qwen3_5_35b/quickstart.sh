#!/usr/bin/env bash
# Installs into a virtual environment, trains the tiny model on 2 CPU ranks with the plain all-to-all and with Chunk MoE
# (N=2 and N=4), then prints one table of the three runs and draws their loss curves. Can be run again at any time.
#
#   VENV    folder of the environment (default: .venv-quickstart)
#   OUTPUT  folder for the metrics and the plot (default: quickstart-output)
#   STEPS   training steps of each run (default: 60)
#   PYTHON, TORCH_INDEX, PACKAGE: see ci/environment.sh
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
source ci/environment.sh

VENV=$(realpath -m "${VENV:-.venv-quickstart}")
OUTPUT=$(realpath -m "${OUTPUT:-quickstart-output}")
STEPS=${STEPS:-60}
[[ $STEPS =~ ^[1-9][0-9]*$ ]] || fail "STEPS: $STEPS: must be a positive integer"
make_environment "$VENV" 2.13.0 standalone,tools
beside_package "$VENV"

# The ranks share this machine: one thread each, and the loopback, which every machine has.
export OMP_NUM_THREADS=1 GLOO_SOCKET_IFNAME=lo

train() { # NAME DISPATCHER CHUNKS
    stage "$STEPS steps on 2 ranks: $1"
    "$VENV/bin/torchrun" --standalone --nproc_per_node 2 -m mindspeed_chunk.standalone examples/qwen3_5_35b/tiny.yaml \
        parallel.ep_plan.dispatcher="$2" parallel.ep_plan.moe_num_chunks="$3" training.train_iters="$STEPS" \
        training.log_interval=$((STEPS < 10 ? 1 : 10)) standalone.metrics_path="$OUTPUT/$1.jsonl"
}

train alltoall alltoall 0
train chunkmoe-N2 chunkmoe 2
train chunkmoe-N4 chunkmoe 4

stage "the three runs"
"$VENV/bin/python" -m mindspeed_chunk.standalone.compare "$OUTPUT"/{alltoall,chunkmoe-N2,chunkmoe-N4}.jsonl \
    --plot "$OUTPUT/loss.png"
