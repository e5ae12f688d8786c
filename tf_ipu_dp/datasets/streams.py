"""Splits that a user's tf.data pipeline streams, sample by sample.

Instance i takes every n-th sample of the stream, from the i-th on, so the order depends on the number of instances. A
resumed run reads past the samples that it has seen; that is exact if the stream repeats itself.
"""

from __future__ import annotations

import dataclasses
import zlib
from typing import Any, ClassVar, Dict, List, Optional

import numpy as np
import tensorflow as tf

from tf_ipu_dp.datasets.order import TrainingShard
from tf_ipu_dp.planning.plan import RunPlan

_SHUFFLED_SAMPLES = 2048


@dataclasses.dataclass(frozen=True)
class StreamSplit:
    """A tf.data dataset of single samples (inputs, targets), or with weights as a third member, of known length."""

    epochs_per_dataset: ClassVar[int] = 1  # each one is a part of the graph

    dataset: Any
    samples: int
    name: str = ""  # of the data set, for what is said of bad samples
    classes: int = 0  # 0: targets are not class numbers
    _known: Dict[range, Any] = dataclasses.field(default_factory=dict, repr=False, compare=False)  # already read

    def make_training(
        self, shard: TrainingShard, seed: int, augment: str, normalise: Any, threads: Dict[str, Any]
    ) -> Any:
        """Returns the micro batches (inputs, targets) of a shard, shuffled within some thousand samples."""
        del augment
        run, instances = shard.run, shard.run.topology.instances
        per_update = run.batch.global_batch_size // instances
        found: Any = None
        for epoch in shard.epochs:
            updates = shard.updates_in(epoch)
            order = np.random.RandomState([seed, epoch, 0x57]).randint(2**31 - 1)
            part = self.dataset.take(self.samples).shard(instances, shard.instance)
            part = part.shuffle(_SHUFFLED_SAMPLES, seed=order, reshuffle_each_iteration=False)
            part = part.skip(updates.start * per_update).take(len(updates) * per_update)
            found = part if found is None else found.concatenate(part)
        batched = found.batch(run.batch.micro_batch_size, drop_remainder=True)
        return batched.map(lambda *batch: self._check(normalise(batch[0]), *batch[1:]), **threads)

    def make_validation(self, run: RunPlan, instance: int, normalise: Any, threads: Dict[str, Any]) -> Any:
        """Returns the micro batches (inputs, targets) of an instance's part, then padding: samples of zeros."""
        part = run.validation.shard(instance)
        empty = tf.nest.map_structure(lambda spec: tf.zeros(spec.shape, spec.dtype), self.dataset.element_spec)
        padding = tf.data.Dataset.from_tensors(empty).repeat(run.validation.slots_per_instance - len(part))
        batched = self._read(part).concatenate(padding).batch(run.batch.micro_batch_size, drop_remainder=True)
        return batched.map(lambda inputs, targets, *_: self._check(normalise(inputs), targets), **threads)

    def read_targets(self, part: range) -> Any:
        """Returns the targets of a range of samples."""
        return self._read_known(part)[0]

    def read_weights(self, part: range) -> Optional[Any]:
        """Returns the weights of a range of samples; None if they have none."""
        known = self._read_known(part)
        return known[1] if len(known) > 1 else None

    def _read_known(self, part: range) -> Any:
        """Returns the targets, and the weights, of a range of samples; the stream is read once."""
        if part not in self._known:
            read: List[Any] = list(self._read(part).map(lambda _, *known: known).batch(1024).as_numpy_iterator())
            spec = self.dataset.element_spec[1:]
            if not read:
                read = [tf.nest.map_structure(lambda each: np.zeros([0, *each.shape], each.dtype.as_numpy_dtype), spec)]
            self._known[part] = tf.nest.map_structure(lambda *parts: np.concatenate(parts), *read)
        return self._known[part]

    def _check(self, *batch: Any) -> Any:
        """Returns a batch that can be trained on; TensorFlow fails for one that cannot, with a sentence in brackets."""
        checks = []
        for leaf in tf.nest.flatten(batch):
            if leaf.dtype.is_floating:
                sentence = f"[--dataset={self.name} streams NaN or infinite numbers.]"
                checks.append(tf.debugging.Assert(tf.reduce_all(tf.math.is_finite(leaf)), [sentence]))
        if self.classes:
            labels = tf.cast(batch[1], tf.int32)
            sentence = f"[--dataset={self.name} streams a label that is none of 0 to {self.classes - 1}.]"
            checks.append(
                tf.debugging.Assert(tf.reduce_all((labels >= 0) & (labels < self.classes)), [sentence, labels])
            )
        with tf.control_dependencies([each for each in checks if each is not None]):
            return tf.nest.map_structure(tf.identity, batch)

    def checksum(self, total: int) -> int:
        """Returns a checksum of the samples' structure and number, continued from another: samples are not read."""
        return zlib.crc32(repr((self.samples, self.dataset.element_spec)).encode(), total)

    def _read(self, part: range) -> Any:
        return self.dataset.skip(part.start).take(len(part))
