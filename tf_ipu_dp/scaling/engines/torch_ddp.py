"""PyTorch DistributedDataParallel on Gloo: `python -m tf_ipu_dp.scaling.engines.torch_ddp ORDER` in every process.

As users of PyTorch on CPUs tune it: threads divided between the processes, channels_last images, gradients that are
views of the buckets, a fused optimizer, samples gathered from memory. Imports PyTorch and no TensorFlow.
A process finds its rank where torchrun and mpirun put it; processes meet in a file beside the order.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any, Iterator, List, Sequence, Tuple

from tf_ipu_dp.scaling.engines import order_files, samples, torch_network
from tf_ipu_dp.scaling.engines.protocol import Answer, Order
from tf_ipu_dp.scaling.engines.update_times import UpdateTimes

_RANK_VARIABLES = ("RANK", "OMPI_COMM_WORLD_RANK")
_MEETING_FILE = "torch_processes"


def main(words: Sequence[str]) -> int:
    """Trains and writes the answer of this process; returns the exit code."""
    order_path = Path(words[0])
    order = order_files.read_order(order_path)
    import torch
    from torch import distributed

    rank = next((int(os.environ[name]) for name in _RANK_VARIABLES if name in os.environ), 0)
    torch.set_num_threads(order.threads)
    torch.manual_seed(order.seed)
    if order.processes > 1:
        meeting = f"file://{order_path.parent.resolve() / _MEETING_FILE}"
        distributed.init_process_group("gloo", init_method=meeting, rank=rank, world_size=order.processes)
    answer = _train(order, rank, order_path)
    order_files.write_answer(answer, order_path)
    if order.processes > 1:
        distributed.barrier()  # process 0 keeps the connections that the others still use
        # What was measured is written. After that, a process of PyTorch 2.13 was once seen to abort while it ended.
        sys.stderr.flush()
        os._exit(0)
    return 0


def _train(order: Order, rank: int, order_path: Path) -> Answer:
    import torch
    from torch import distributed

    model = _make_model(order)
    optimizer, kernels = _make_optimizer(order, model)
    compute_loss = torch.nn.CrossEntropyLoss(label_smoothing=order.label_smoothing)
    total_loss = torch.zeros([])
    first_loss, input_wait_s, began = 0.0, 0.0, time.perf_counter()
    times = UpdateTimes(order)
    batches = _read_batches(order, rank)
    made = 0
    for update in range(order.warmup_updates + order.updates):
        if update == order.warmup_updates:
            if order.processes > 1:
                distributed.barrier()
            order_files.wait_for_others(order, order_path)
            input_wait_s, began = 0.0, time.perf_counter()
            times.begin(began)
        asked = time.perf_counter()
        images, labels = next(batches)
        input_wait_s += time.perf_counter() - asked
        loss = compute_loss(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        if order.weight_decay:
            with torch.no_grad():
                torch._foreach_mul_(kernels, 1 - order.learning_rate * order.weight_decay)
        optimizer.step()
        total_loss += loss.detach()
        made = update + 1
        if update == 0:
            first_loss = float(loss)
        if order.times_updates and update >= order.warmup_updates and times.end_update(time.perf_counter()):
            break
    return Answer(
        rank=rank,
        engine=f"PyTorch {torch.__version__}" + (", DDP on Gloo" if order.processes > 1 else ""),
        seconds=time.perf_counter() - began,
        samples=(made - order.warmup_updates) * order.batch_size,
        first_loss=first_loss,
        input_wait_s=input_wait_s,
        mean_loss=float(total_loss) / made,
        update_s=tuple(times.seconds),
    )


def _make_model(order: Order) -> Any:
    """Returns the model, with the order's weights if it has some; with several processes, in DDP."""
    import numpy as np
    import torch

    network = torch_network.make_network(samples.describe_model(order))
    if order.weights is None:
        torch_network.initialise(network)
    else:
        with np.load(order.weights) as arrays:
            torch_network.load_weights(network, arrays)
    network = network.to(memory_format=torch.channels_last)
    if order.processes == 1:
        return network
    # Every process keeps its own moving statistics: sending them in every update would only cost time.
    return torch.nn.parallel.DistributedDataParallel(
        network, gradient_as_bucket_view=True, static_graph=True, broadcast_buffers=False
    )


def _make_optimizer(order: Order, model: Any) -> Tuple[Any, List[Any]]:
    """Returns SGD with momentum, and the kernels, which alone have L2 and weight decay."""
    import torch

    kernels = [each for each in model.parameters() if each.ndim > 1]
    others = [each for each in model.parameters() if each.ndim <= 1]
    groups = [{"params": kernels, "weight_decay": order.l2}, {"params": others}]
    return torch.optim.SGD(groups, lr=order.learning_rate, momentum=order.momentum, fused=True), kernels


def _read_batches(order: Order, rank: int) -> Iterator[Tuple[Any, Any]]:
    """Yields the process's batches; the images are channels_last without a copy."""
    import torch

    split = samples.load(order)
    images, labels = torch.from_numpy(split.images), torch.from_numpy(split.labels)
    factor, offset = torch.from_numpy(split.factor), torch.from_numpy(split.offset)
    for rows in torch.from_numpy(samples.rows_of_updates(order, rank, len(labels)).astype("int64")):
        pixels = images.index_select(0, rows).float()
        yield pixels.mul_(factor).add_(offset).permute(0, 3, 1, 2), labels.index_select(0, rows)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
