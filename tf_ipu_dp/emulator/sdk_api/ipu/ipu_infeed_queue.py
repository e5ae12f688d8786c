"""`tensorflow.python.ipu.ipu_infeed_queue`: queues that feed elements of a dataset to the replicas.

All R replicas share one pass over the dataset: each gets every R-th element, in order.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from typing import Any, Iterator, Optional

import tensorflow as tf
from tensorflow.python.data.ops import iterator_ops

from tf_ipu_dp.emulator import patches
from tf_ipu_dp.emulator.runtime import replicas
from tf_ipu_dp.emulator.sdk_api.ipu.ipu_outfeed_queue import check_feed_shape, check_feed_type, replicas_text

_PATCH = "dataset iterators"
_DEFAULT_DEPTH = 3
_host = threading.local()


class IPUInfeedQueue:
    """A dataset that a program of the device takes elements from."""

    def __init__(
        self,
        dataset: Any,
        device_ordinal: Optional[int] = None,
        prefetch_depth: Optional[int] = None,
        optimise_latency: bool = False,
        **unknown: Any,
    ) -> None:
        check_options(prefetch_depth, device_ordinal, optimise_latency, **unknown)
        check_dataset(dataset)
        self._dataset = dataset
        self._iterator: Any = None
        self._graph_iterators: Any = weakref.WeakKeyDictionary()  # by graph of TensorFlow 1
        self._initialised_in: Any = weakref.WeakSet()  # these graphs
        self._is_initialised = False  # in eager mode
        self._dequeued = False

    @property
    def initializer(self) -> Any:
        """Makes the iterator; in a graph, returns the operation that does."""
        graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
        if self._is_initialised if graph is None else graph in self._initialised_in:
            raise ValueError("The infeed queue has been initialised already.")
        if graph is not None:
            self._initialised_in.add(graph)
            return self._make_graph_iterator().initializer
        self._is_initialised = True
        if self._iterator is None:
            self._iterator = IPUOwnedIterator(self._dataset)
        else:  # traced programs refer to this iterator
            self._iterator.restart()
        return tf.no_op()

    @property
    def deleter(self) -> Any:
        """Ends the iterator; afterwards the queue can be initialised again, from the beginning."""
        graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
        if not (self._is_initialised if graph is None else graph in self._initialised_in):
            raise tf.errors.NotFoundError(None, None, "The infeed queue has not been initialised.")
        if graph is None:
            self._is_initialised = False
        else:
            self._initialised_in.discard(graph)
        return tf.no_op()

    @property
    def dequeued(self) -> bool:
        """Whether a program takes elements from the queue."""
        return self._dequeued

    @property
    def number_of_tuple_elements(self) -> int:
        """The tensors of one element."""
        return len(tf.nest.flatten(self._dataset.element_spec))

    @property
    def element_spec(self) -> Any:
        """The structure of one element."""
        return self._dataset.element_spec

    def get_next(self) -> Any:
        """Refused: obsolete in the SDK."""
        raise ValueError("IPUInfeedQueue.get_next is obsolete: give the queue to ipu.loops or to a pipeline.")

    def _dequeue(self) -> Any:
        """Returns this replica's next element, in the program that is being traced."""
        self._dequeued = True
        if not tf.compat.v1.executing_eagerly_outside_functions():
            return self._make_graph_iterator().get_next()  # the session will run the initializer first
        if not self._is_initialised:
            raise tf.errors.FailedPreconditionError(
                None, None, "The infeed queue has not been initialised: read its `initializer` first."
            )
        return self._iterator.get_next()

    def _make_graph_iterator(self) -> Any:
        with tf.init_scope():  # outside of the loop that is being built
            graph = tf.compat.v1.get_default_graph()
            if graph not in self._graph_iterators:
                self._graph_iterators[graph] = tf.compat.v1.data.make_initializable_iterator(self._dataset)
        return self._graph_iterators[graph]


class IPUOwnedIterator(iterator_ops.OwnedIterator):  # type: ignore[misc]
    """What `iter(dataset)` gives in the scope of an IPU strategy: an iterator for functions of the device."""

    def __init__(
        self, dataset: Any = None, infeed_spec: Any = None, element_spec: Any = None, **infeed_kwargs: Any
    ) -> None:
        specs = (infeed_spec, element_spec)
        if (dataset is None) == (None in specs) or (dataset is not None and specs != (None, None)):
            raise ValueError(f"{type(self).__name__} takes either a dataset, or infeed_spec and element_spec.")
        if dataset is None:
            raise NotImplementedError(f"The emulator makes an {type(self).__name__} from a dataset only.")
        IPUInfeedQueue(dataset, **infeed_kwargs)  # for its checks
        super().__init__(dataset)
        self._program_replicas: Optional[int] = None  # of the programs that take elements

    def restart(self) -> None:
        """Starts again at the first element."""
        self._program_replicas = None
        tf.raw_ops.MakeIterator(dataset=self._dataset._variant_tensor, iterator=self._iterator_resource)

    def feed(self, count: int) -> None:
        """Deals the elements to this many replicas from now on. Other programs must have as many."""
        if self._program_replicas is not None and self._program_replicas != count:
            raise tf.errors.FailedPreconditionError(
                None,
                None,
                f"The iterator feeds programs of {replicas_text(self._program_replicas)}, and cannot feed one of "
                f"{replicas_text(count)} as well: make another iterator for it.",
            )
        self._program_replicas = count

    def __next__(self) -> Any:
        return self._get_in_function(super().__next__)

    def next(self) -> Any:
        """The same as `__next__`."""
        return self.__next__()

    def get_next(self) -> Any:
        """Returns the next element, in a function of the device."""
        return self._get_in_function(super().get_next)

    def get_next_as_optional(self) -> Any:
        """Refused, as in the SDK."""
        raise NotImplementedError("An IPU iterator has no get_next_as_optional.")

    def _get_in_function(self, get: Any) -> Any:
        if tf.executing_eagerly():
            raise RuntimeError(
                "The next element of an IPU iterator is available only in a tf.function of the device; "
                "make the iterator outside the strategy's scope to use it on the host."
            )
        program = replicas.current()
        if program is not None:
            program.iterators.append(self)
        return get()

    def _gather_saveables_for_checkpoint(self) -> Any:
        raise NotImplementedError("An IPU iterator cannot be checkpointed.")


class IPUIterator(IPUOwnedIterator):
    """As IPUOwnedIterator. The SDK does not free this one automatically; here both are freed with the object."""


def check_options(
    prefetch_depth: Optional[int] = None,
    device_ordinal: Optional[int] = None,
    optimise_latency: bool = False,
    **unknown: Any,
) -> None:
    """Refuses impossible options of an infeed queue."""
    del optimise_latency, unknown  # the SDK ignores unknown keywords too
    if device_ordinal is not None and (type(device_ordinal) is not int or device_ordinal < 0):
        raise ValueError(f"device_ordinal must be an int of 0 or more, not {device_ordinal!r}.")
    if not 0 < (prefetch_depth or _DEFAULT_DEPTH) <= 255:
        raise ValueError(f"prefetch_depth must be between 1 and 255, not {prefetch_depth}.")


def check_dataset(dataset: Any) -> None:
    """Refuses what cannot be fed: unknown shapes, empty dimensions, types that the device does not support."""
    for spec in tf.nest.flatten(dataset.element_spec):
        if not spec.shape.is_fully_defined():
            raise ValueError(
                f"The dataset's elements have shape {spec.shape}, but shapes must be known: "
                "use batch(..., drop_remainder=True)."
            )
        check_feed_shape(spec.shape)
        check_feed_type(spec.dtype, "A feed")


@contextlib.contextmanager
def on_host() -> Iterator[None]:
    """Inside, `iter(dataset)` gives the stock iterator: the host itself reads the data."""
    before = getattr(_host, "depth", 0)
    _host.depth = before + 1
    try:
        yield
    finally:
        _host.depth = before


def extend_datasets() -> None:
    """Makes `iter(dataset)` return an IPU iterator in the scope of an IPU strategy. Calling it twice is harmless."""
    if patches.is_applied(_PATCH):
        return
    stock = tf.data.Dataset.__iter__

    def make_iterator(self: Any) -> Any:
        strategy = tf.distribute.get_strategy()
        wanted = getattr(strategy, "enable_dataset_iterators", False) and not getattr(_host, "depth", 0)
        return IPUOwnedIterator(self) if wanted and tf.executing_eagerly() else stock(self)

    patches.set_attribute(_PATCH, tf.data.Dataset, "__iter__", make_iterator)
