"""Collectives between the instances of a job, over Horovod. With one instance nothing is sent, and nothing imported.

Everything that instances exchange goes through here, so that all of them make the same calls in the same order. It is
timed, because this is where instances wait for a slow one. If all instances are on one host, what they exchange goes
through shared memory, in traced programs and between them.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import time
from typing import Any, Callable, Dict, FrozenSet, Iterator, List, Optional, Sequence, Set, Tuple

from tf_ipu_dp.emulator import patches, popdist_variables
from tf_ipu_dp.emulator.runtime import wait_meter

_SETS = "HOROVOD_DYNAMIC_PROCESS_SETS"
_EXCHANGE = "IPU_EMULATOR_EXCHANGE"  # horovod: no shared memory
_TIMELINE = "HOROVOD_TIMELINE"  # shows what Horovod exchanges, so nothing may bypass it
_connected = False
_server: Any = None  # on instance 0, if the launcher runs none
_sets: Dict[FrozenSet[int], Any] = {}
_confined: List[FrozenSet[int]] = []
# The shared memory of all instances, or None: of traced programs (True), and of what is exchanged beside them, maybe at
# the same time. Both are made when they are first needed, which is at the same place on all instances.
_on_host: Dict[bool, Any] = {}
_meter = wait_meter.Meter()  # of traced programs
_exchanges = wait_meter.RecentTimes(kept=256)  # of gradients
_eager_lock = threading.Lock()
_horovod_threads: Set[int] = set()  # that this module has started
_LOWEST_PRIORITY = 19
_eager_seconds = 0.0
_eager_calls = 0


def count() -> int:
    """Returns how many instances take part in collectives: those of the job, or of the subset they are confined to."""
    return len(_confined[-1]) if _confined else _size()


def count_on_host() -> int:
    """Returns how many instances of the job run on this host. They must be connected."""
    return int(_horovod().local_size()) if _size() > 1 else 1


def position() -> int:
    """Returns the index of this instance among them."""
    return sorted(_confined[-1]).index(_instance_index()) if _confined else _instance_index()


def members() -> Optional[FrozenSet[int]]:
    """Returns the instances that collectives are confined to, or None. Functions are traced for this subset."""
    return _confined[-1] if _confined else None


def connect() -> None:
    """Connects to the other instances. Calling it again is harmless."""
    global _connected, _server  # noqa: PLW0603
    if not _connected and _size() > 1:
        from tf_ipu_dp.emulator.launcher import rendezvous  # late: only a job of several instances needs it

        horovod = _horovod()
        if not horovod.is_initialized():
            if rendezvous.connects_by_mpi(os.environ, horovod.mpi_built()):
                # Process sets are enabled from the start, because MPI cannot be restarted. While it waits, Open MPI
                # must yield the cores to processes that compute.
                wanted = {_SETS: "1", "OMPI_MCA_mpi_yield_when_idle": "1"}
                unset = {name: value for name, value in wanted.items() if name not in os.environ}
                patches.set_environment("horovod settings", unset)
            else:
                _server = rendezvous.complete(os.environ, _instance_index(), _size())
            _start(horovod)
        if horovod.size() != _size():
            where = "the MPI of Horovod" if horovod.mpi_enabled() else "Horovod"
            raise RuntimeError(
                f"There are {_size()} instances, but {where} sees {horovod.size()}. Start them with "
                "python -m tf_ipu_dp.emulator.poprun, or with the mpirun of the MPI that Horovod was built with."
            )
    _connected = True


def is_connected() -> bool:
    """Whether `connect` has been called."""
    return _connected


def disconnect() -> None:
    """Closes the connection to the other instances."""
    global _connected, _server  # noqa: PLW0603
    if _connected and _size() > 1:
        for memory in _on_host.values():
            if memory is not None:
                memory.close()
        _on_host.clear()
        _horovod().shutdown()
        _sets.clear()
        if _server is not None:
            _server.stop()
            _server = None
    _connected = False


@contextlib.contextmanager
def confined_to(members: FrozenSet[int]) -> Iterator[bool]:
    """Confines collectives to a subset of the instances; yields whether this is one of them. All must call it."""
    unknown = sorted(members - set(range(_size())))
    if unknown or not members:
        raise ValueError(f"There is no instance {unknown[0] if unknown else 'in an empty set'} of {_size()}.")
    if 1 < len(members) < _size() and members not in _sets:
        if _confined:
            raise RuntimeError(
                f"The subset {sorted(members)} is not known within {sorted(_confined[-1])}: all instances must "
                "register it. Call execute_on_instances with it on all instances first."
            )
        connect()
        _allow_subsets()
        _sets[members] = _horovod().add_process_set(sorted(members))
    _confined.append(members)
    try:
        yield _instance_index() in members
    finally:
        _confined.pop()


def barrier() -> None:
    """Returns when every instance has called it."""
    if count() > 1:
        import tensorflow as tf

        sum_over_instances([tf.zeros([1])], "synchronize")


def sum_over_instances(tensors: Sequence[Any], name: str, *, has_gradients: bool = False) -> List[Any]:
    """Returns the sums over all instances: one grouped all-reduce for each type of number.

    `has_gradients`: a traced program that exchanges its gradients; `exchange_times` are those of these exchanges.
    """
    if count() == 1 or not tensors:
        return list(tensors)
    horovod = _horovod()
    sums: Dict[int, Any] = {}
    spans: List[Tuple[Any, Any]] = []
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        places = [place for place, tensor in enumerate(tensors) if tensor.dtype == dtype]
        full_name = f"{name}.{dtype.name}"

        def exchange(given: List[Any], memory: Any, full_name: str = full_name) -> Sequence[Any]:
            if memory is not None and memory.can_sum(given[0].dtype.name):
                return _through_memory(lambda *arrays: memory.sum(full_name, arrays), given)
            return horovod.grouped_allreduce(given, op=horovod.Sum, name=full_name, **_options())

        sums.update(zip(places, _timed([tensors[place] for place in places], exchange, spans)))
    if has_gradients and spans:
        import tensorflow as tf

        # From when all of it was ready: metrics may be sent while gradients of another type are still computed.
        began, ended = (functools.reduce(tf.maximum, moments) for moments in zip(*spans))
        _exchanges.add(ended - began)
    return [sums[place] for place in range(len(tensors))]


def all_gather(tensor: Any, name: Optional[str] = None) -> Any:
    """Returns the tensors of all instances, stacked."""
    if count() == 1:
        return tensor[None]

    def exchange(given: List[Any], memory: Any) -> Sequence[Any]:
        if memory is not None:
            return _through_memory(lambda array: [memory.gather(name, array)], given, stacked=count())
        return [_horovod().allgather(given[0][None], name=name, **_options())]

    return _timed([tensor], exchange)[0]


def broadcast(tensor: Any, name: Optional[str] = None) -> Any:
    """Returns the tensor of instance 0, or of the first instance of the subset."""
    if count() == 1:
        return tensor
    root = min(_confined[-1]) if _confined else 0

    def exchange(given: List[Any], memory: Any) -> Sequence[Any]:
        if memory is not None:
            return _through_memory(lambda array: [memory.broadcast(name, array, root)], given)
        return [_horovod().broadcast(given[0], root_rank=root, name=name, **_options())]

    return _timed([tensor], exchange)[0]


def seconds_in_collectives() -> float:
    """Returns the time that this process has spent in collectives so far, mostly waiting for others."""
    return _meter.seconds() + _eager_seconds


def seconds_in_program_collectives() -> float:
    """Returns the part of it in traced programs, which executions wait for."""
    return _meter.seconds()


def exchange_times() -> Tuple[int, List[float]]:
    """Returns how often Keras models have exchanged gradients so far, and the seconds of the last exchanges."""
    return _exchanges.read()


def uses_shared_memory() -> bool:
    """Whether traced programs have found shared memory to exchange through so far."""
    return _on_host.get(True) is not None


def is_waiting() -> bool:
    """Whether this process is in a collective now. Can be called from any thread."""
    return _eager_calls > 0 or _meter.is_waiting()


def _shared_memory() -> Any:
    """Returns the memory through which instances exchange what they exchange now; None if they have to use Horovod."""
    import tensorflow as tf

    traced = not tf.executing_eagerly()
    if _confined or (traced and not tf.compat.v1.executing_eagerly_outside_functions()):
        return None
    if traced not in _on_host:
        with tf.init_scope():
            _on_host[traced] = _connect_on_host()
    return _on_host[traced]


def _connect_on_host() -> Any:
    import tensorflow as tf

    from tf_ipu_dp.emulator.runtime import shared_memory  # late: it needs numpy

    horovod = _horovod()

    def gather(content: bytes) -> List[bytes]:
        own = tf.constant([list(content)], tf.uint8)
        return [row.tobytes() for row in horovod.allgather(own, name="shared_memory.addresses").numpy()]

    def all_of(value: bool) -> bool:
        counted = horovod.allreduce(tf.constant(int(value)), op=horovod.Sum, name="shared_memory.connected")
        return int(counted) == _size()

    # MPI has a shared memory of its own; who starts the instances with it wants it to be used.
    asks_for_horovod = os.environ.get(_EXCHANGE, "") == "horovod" or _TIMELINE in os.environ
    is_wanted = not asks_for_horovod and not horovod.mpi_enabled()
    memory = shared_memory.connect(_instance_index(), _size(), gather, all_of) if all_of(is_wanted) else None
    if memory:
        _make_horovod_idle()
    return memory


def _through_memory(
    exchange: Callable[..., Sequence[Any]], tensors: Sequence[Any], stacked: Optional[int] = None
) -> List[Any]:
    """Calls a function of arrays that returns as many, of the same shapes or stacks of so many; or traces the call."""
    import tensorflow as tf

    if tf.executing_eagerly():
        try:
            return [tf.constant(array) for array in exchange(*(tensor.numpy() for tensor in tensors))]
        except RuntimeError as error:  # as a traced program raises it
            raise tf.errors.UnknownError(None, None, str(error)) from error
    types = [tensor.dtype for tensor in tensors]
    received = tf.numpy_function(exchange, tensors, types, name="SharedMemory")
    for tensor, like in zip(received, tensors):
        tensor.set_shape(like.shape if stacked is None else tf.TensorShape([stacked]).concatenate(like.shape))
    return list(received)


def _allow_subsets() -> None:
    """Restarts Horovod with support for subsets of instances. Only on demand: it makes every collective slower."""
    if _SETS not in os.environ:
        barrier()
        _horovod().shutdown()
        patches.set_environment("horovod settings", {_SETS: "1"})
        _start(_horovod())


def _start(horovod: Any) -> None:
    """Starts Horovod with its threads at the lowest priority.

    They poll the other instances a thousand times a second, which costs each instance a third of a core. At the lowest
    priority they use the cores only while these are idle.
    """
    before = _threads()
    horovod.init()
    _horovod_threads.clear()
    _horovod_threads.update(_threads() - before)
    for thread in _horovod_threads:
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, thread, _LOWEST_PRIORITY)


def _make_horovod_idle() -> None:
    """Lets Linux take a core on which only Horovod's threads run for an idle one, once nothing waits for them.

    Otherwise their polling keeps threads that compute from an idle core: two instances of an MLP then took turns on one
    core. Not before: on busy cores, who waits for such a thread waits for seconds.
    """
    for thread in _horovod_threads:
        with contextlib.suppress(OSError):
            os.sched_setscheduler(thread, os.SCHED_IDLE, os.sched_param(0))


def _threads() -> Set[int]:
    try:
        return {int(name) for name in os.listdir("/proc/self/task")}  # noqa: PTH208
    except OSError:  # not Linux
        return set()


def _timed(
    tensors: List[Any],
    exchange: Callable[[List[Any], Any], Sequence[Any]],
    spans: Optional[List[Tuple[Any, Any]]] = None,
) -> List[Any]:
    """Returns what is received. `exchange` gets the tensors and the shared memory, or None.

    A traced program's beginning and end are appended to `spans`.
    """
    global _eager_seconds, _eager_calls  # noqa: PLW0603
    import tensorflow as tf

    memory = _shared_memory()
    if tf.executing_eagerly():
        began = time.monotonic()
        with _eager_lock:
            _eager_calls += 1
        try:
            return list(exchange(tensors, memory))
        finally:
            with _eager_lock:
                _eager_calls -= 1
                _eager_seconds += time.monotonic() - began
    if not tf.compat.v1.executing_eagerly_outside_functions():
        return list(exchange(tensors, memory))
    moment = wait_meter.now(tensors)
    # The collectives of a program come one after the other, in the same order on all instances.
    with tf.control_dependencies([_meter.begin([moment]), _meter.take_turn([moment])]):
        received = list(exchange([tf.identity(tensor) for tensor in tensors], memory))
    ended = wait_meter.now(received)
    if spans is not None:
        spans.append((moment, ended))
    with tf.control_dependencies([_meter.end(received), _meter.take_turn(received), _meter.spend(ended - moment)]):
        return [tf.identity(tensor) for tensor in received]


def _options() -> Dict[str, Any]:
    return {"process_set": _sets[_confined[-1]]} if _confined and _confined[-1] in _sets else {}


def _size() -> int:
    names = (popdist_variables.TOTAL_REPLICAS, popdist_variables.LOCAL_REPLICAS)
    total, local = (int(os.environ.get(name, "1")) for name in names)
    return total // local


def _instance_index() -> int:
    return popdist_variables.instance_index(os.environ)


def _horovod() -> Any:
    import horovod.tensorflow as horovod

    return horovod
