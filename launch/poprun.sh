#!/usr/bin/env bash
# Trains on a POD, in several instances through the Poplar SDK's poprun. All flags are those of python -m tf_ipu_dp.launch:
#   launch/poprun.sh --instances=4 --flagfile=flags/resnet50_1_ipu.flags --ipus=16
#   LAUNCHER_ARGS="--vipu-partition=p16" MAX_RESTARTS=3 launch/poprun.sh --instances=4 --hosts=node1,node2 --ipus=16
set -euo pipefail
launcher=${LAUNCHER:-poprun}
launcher_args=${LAUNCHER_ARGS:-}
max_restarts=${MAX_RESTARTS:-0}
source "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/environment.sh" run
export TF_IPU_DP_LAUNCH=${TF_IPU_DP_LAUNCH:-$(dirname "$0")}  # for commands that are printed
exec "$python" -m tf_ipu_dp.launch --launcher="$launcher" --launcher_args="$launcher_args" --max_restarts="$max_restarts" "$@"
