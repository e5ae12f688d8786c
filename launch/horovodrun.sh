#!/usr/bin/env bash
# Trains in several instances through Horovod's own horovodrun. All flags are those of python -m tf_ipu_dp.train:
#   launch/horovodrun.sh --model=resnet20 --dataset=cifar10
#   INSTANCES=4 HOSTS=node1:2,node2:2 launch/horovodrun.sh --ipus=8 --model=resnet20 --dataset=cifar10
set -euo pipefail
instances=${INSTANCES:-2}
hosts=${HOSTS:-localhost:$instances}
controller=${CONTROLLER:---gloo}
source "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/environment.sh" distributed
export TF_IPU_DP_LAUNCH=${TF_IPU_DP_LAUNCH:-$(dirname "$0")}  # for commands that are printed
exec "$python" -m horovod.runner.launch -np "$instances" -H "$hosts" "$controller" "$python" -m tf_ipu_dp.train "$@"
