"""Scores of a task with its own loss and metrics: every sample counts once, on any number of instances and replicas.

Losses are computed sample by sample, and added up as 64-bit numbers. Metrics are Keras': the numbers that they count
are added up over the instances before the result is taken, as tf.distribute does.
"""

from __future__ import annotations

from difflib import get_close_matches
from typing import Any, Dict, FrozenSet, List, Optional, Sequence, Tuple

import numpy as np
import tensorflow as tf

from tf_ipu_dp import cli, user_code
from tf_ipu_dp.datasets.info import Structure, TensorInfo, map_structure
from tf_ipu_dp.distributed.world import World
from tf_ipu_dp.runs import records
from tf_ipu_dp.task import Task

_CHUNK = 256  # samples
_METRICS_BY_SHAPE = {"accuracy", "acc", "crossentropy", "ce"}  # Keras chooses one by the shapes of targets and outputs
_NO_NAMES = ("deserialize", "experimental", "get", "serialize", "Loss", "Metric", "Reduction")


class TaskScorer:
    """Scores outputs of a model by a task's loss and metrics, outside any strategy."""

    def __init__(self, model: Any, task: Task, name: str) -> None:
        self._name, self._names = name, list(model.output_names)
        self._shapes = [tuple(each.shape[1:]) for each in model.outputs]
        self._losses = self._by_output(task.loss)
        weights = self._by_output(task.loss_weights) if task.loss_weights is not None else [1.0] * len(self._names)
        self._weights = [1.0 if each is None else float(each) for each in weights]
        self._probe: Optional[Any] = None
        self.masks: Optional[List[Any]] = None  # of the validation samples, for each output, once they are known
        if task.metrics or task.weighted_metrics:
            self._require_metrics((task.metrics, task.weighted_metrics))
            # A model that returns what it is given, so that Keras resolves the metrics as it does for the real one.
            inputs = [tf.keras.Input(each.shape[1:], dtype=tf.float32) for each in model.outputs]
            outputs = [
                tf.keras.layers.Activation("linear", name=each)(tensor) for each, tensor in zip(self._names, inputs)
            ]
            self._probe = tf.keras.Model(inputs, outputs[0] if len(outputs) == 1 else outputs)
            metrics, weighted = (
                tf.nest.map_structure(self._copy, each) for each in (task.metrics, task.weighted_metrics)
            )
            self._probe.compile(metrics=metrics, weighted_metrics=weighted)

    def try_out(self, targets: Optional[Structure], *, weighted: bool = False) -> Tuple[str, ...]:
        """Returns the names of what is counted besides the loss; UsageError for a loss or metric that does not work.

        Computes them for two samples of zeros. `targets` describes those of the data; None: class numbers.
        """

        def zeros(each: TensorInfo) -> Any:
            return np.zeros([2, *each.shape], each.dtype)

        expected = self._targets(map_structure(zeros, targets or TensorInfo((), "int32")))
        predicted: List[Any] = [np.zeros([2, *(size or 1 for size in shape)], np.float32) for shape in self._shapes]
        try:
            pairs = [_match(each, given) for each, given in zip(expected, predicted)]
            for loss, pair in zip(self._losses, pairs):
                if loss is not None and weighted and not self._has_loss_per_sample(loss, *pair):
                    raise cli.UsageError(
                        f"--model={self._name} has a loss that returns one number for a batch, and the samples have "
                        "weights. Return a number for each sample: reduce over axis=-1."
                    )
                if loss is not None:
                    self._sample_losses(loss, *pair)
            if self._probe is not None:
                self._prepare_metrics(predicted, expected)
        except cli.UsageError:
            raise
        except Exception as error:  # any: losses and metrics are the user's
            described = str(targets or "class numbers")
            raise cli.UsageError(
                f"--model={self._name} has a loss or metric that fails for targets of {described} and outputs of "
                f"{' and '.join(' x '.join(map(str, shape)) or 'one number' for shape in self._shapes)}: "
                f"{user_code.describe_error(error, self._name)}"
            ) from error
        names = [f"{name}_loss" for name, loss in zip(self._names, self._losses) if loss is not None]
        counted = [each.name for each in self._probe.compiled_metrics.metrics] if self._probe is not None else []
        return (*(names if len(self._names) > 1 else []), *counted)

    @property
    def running_metrics(self) -> FrozenSet[str]:
        """The names of metrics that are no means over samples, like an AUC, once `try_out` has made them."""
        metrics = self._probe.compiled_metrics.metrics if self._probe is not None else []
        return frozenset(each.name for each in metrics if not _is_mean(each))

    def score(
        self,
        outputs: Any,
        targets: Any,
        world: World,
        weights: Optional[Any] = None,
        masks: Optional[Sequence[Optional[Any]]] = None,
    ) -> records.Scores:
        """Returns the scores over the samples of all instances; this one's are given. Called by all instances.

        Weights of the samples count in the losses, which are means over all samples, and in weighted metrics. A loss
        for each place of samples whose output has a mask is the mean over the places that the mask keeps.
        """
        predicted: List[Any] = [np.asarray(each, np.float32) for each in _listed(outputs)]
        expected = self._targets(targets)
        count = len(expected[0])
        masks = masks or [None] * len(self._names)
        totals: Any = np.zeros(len(self._names), np.float64)
        counts: Any = np.zeros(len(self._names), np.float64)
        if self._probe is not None:
            self._prepare_metrics(predicted, expected)
        for first in range(0, count, _CHUNK):
            some = slice(first, min(first + _CHUNK, count))
            pairs = [_match(each[some], given[some]) for each, given in zip(expected, predicted)]
            kept: List[Any] = [None if mask is None else np.asarray(mask[some], bool) for mask in masks]
            for place, (loss, pair) in enumerate(zip(self._losses, pairs)):
                if loss is not None:
                    losses, counted = self._sample_losses(loss, *pair), float(len(pair[0]))
                    if kept[place] is not None:
                        losses, counted = self._masked_losses(loss, pair, kept[place], losses)
                    totals[place] += (losses if weights is None else losses * weights[some]).sum()
                    counts[place] += counted
            if self._probe is not None:
                for (_, given), mask in zip(pairs, kept):
                    if mask is not None:
                        given._keras_mask = tf.convert_to_tensor(mask)  # as layers leave it for the metrics
                self._update_metrics(pairs, None if weights is None else weights[some])
        samples, *summed = world.sum_over_instances([count, *totals, *counts])
        middle = len(self._names)
        means = [total / (counted or 1.0) for total, counted in zip(summed[:middle], summed[middle:])]
        total = sum(weight * mean for weight, mean in zip(self._weights, means))
        found: Dict[str, Optional[float]] = {}
        if len(self._names) > 1:
            named = zip(self._names, means, self._losses)
            found = {f"{name}_loss": records.finite(loss) for name, loss, given in named if given is not None}
        if self._probe is not None:
            found.update(self._sum_metrics(world))
        return records.Scores(int(samples), records.finite(total), None, None, found)

    def _by_output(self, given: Any) -> List[Any]:
        """Returns one entry for each output: by name, in order, or the same for all."""
        if isinstance(given, dict):
            unknown = sorted(set(given) - set(self._names))
            if unknown:
                raise cli.UsageError(
                    f"--model={self._name} has a loss for {unknown[0]!r}; its outputs are "
                    f"{cli.alternatives(self._names)}."
                )
            found = [given.get(name) for name in self._names]
        elif isinstance(given, (list, tuple)):
            found = list(given)
        else:
            found = [given] * len(self._names)
        if len(found) != len(self._names):
            raise cli.UsageError(
                f"--model={self._name} has {len(found)} losses for {len(self._names)} outputs "
                f"({cli.alternatives(self._names)})."
            )
        return [self._loss(each) if isinstance(each, str) else each for each in found]

    def _loss(self, name: str) -> Any:
        try:
            return tf.keras.losses.get(name)
        except ValueError as error:
            raise self._unknown("loss", name, tf.keras.losses) from error

    def _require_metrics(self, given: Any) -> None:
        """Raises a UsageError for the name of a metric that Keras does not know: it fails later, without the name."""
        for name in {each for each in tf.nest.flatten(given) if isinstance(each, str)} - _METRICS_BY_SHAPE:
            try:
                known = not isinstance(tf.keras.metrics.get(name), str)
            except ValueError:
                known = False
            if not known:
                raise self._unknown("metric", name, tf.keras.metrics)

    def _unknown(self, what: str, name: str, module: Any) -> cli.UsageError:
        names = [each for each in dir(module) if not each.startswith("_") and each not in _NO_NAMES]
        near = get_close_matches(name, names, n=1, cutoff=0.5)
        guess = f"Did you mean {near[0]!r}?" if near else "Give one of Keras' names, or a function."
        return cli.UsageError(f"--model={self._name} has the {what} {name!r}, which Keras does not know. {guess}")

    def _targets(self, targets: Any) -> List[Any]:
        if isinstance(targets, dict):
            missing = [name for name in self._names if name not in targets]
            if missing:
                raise cli.UsageError(
                    f"--model={self._name} has the output {missing[0]!r}, for which the data has no targets: it has "
                    f"{cli.alternatives(sorted(targets))}."
                )
            return [targets[name] for name in self._names]
        found = list(targets) if isinstance(targets, tuple) else [targets]
        if len(found) != len(self._names):
            raise cli.UsageError(
                f"--model={self._name} has {cli.count(len(self._names), 'output')}, but the data has "
                f"{cli.count(len(found), 'target')}."
            )
        return found

    def _sample_losses(self, loss: Any, targets: Any, outputs: Any) -> Any:
        """Returns a loss for each sample. A loss that returns one number for all gets one sample at a time."""
        call = _callable(loss)
        values: Any = np.asarray(call(targets, outputs), np.float64)
        if values.ndim and values.shape[0] == len(targets):
            return values.reshape(len(targets), -1).mean(axis=1)
        single: List[Any] = [
            np.asarray(call(targets[i : i + 1], outputs[i : i + 1]), np.float64) for i in range(len(targets))
        ]
        return np.array([value.mean() for value in single])

    def _masked_losses(self, loss: Any, pair: Tuple[Any, Any], mask: Any, losses: Any) -> Tuple[Any, float]:
        """Returns the sums of the losses of the places that a mask keeps, by sample, and how many places these are.

        A loss that is not one for each place is that of the whole sample, as without a mask.
        """
        values: Any = np.asarray(_callable(loss)(*pair), np.float64)
        if values.shape != mask.shape:
            return losses, float(len(pair[0]))
        return (values * mask).reshape(len(mask), -1).sum(axis=1), float(mask.sum())

    def _has_loss_per_sample(self, loss: Any, targets: Any, outputs: Any) -> bool:
        shape = tuple(tf.convert_to_tensor(_callable(loss)(targets, outputs)).shape)
        return bool(shape) and shape[0] == len(targets)

    def _copy(self, metric: Any) -> Any:
        """Returns a metric outside the strategy that the model's was made in."""
        if not isinstance(metric, tf.keras.metrics.Metric):
            return metric
        try:
            return type(metric).from_config(metric.get_config())
        except Exception as error:  # a metric of the user may have any constructor
            raise cli.UsageError(
                f"--model={self._name} has the metric {metric.name!r}, which cannot be made again from its "
                f"get_config() ({cli.first_line(str(error))}). Give it a get_config with its constructor's arguments."
            ) from error

    def _prepare_metrics(self, predicted: List[Any], expected: List[Any]) -> None:
        """Makes the metrics, also on an instance without samples, and sets them back."""
        metrics = self._probe.compiled_metrics  # type: ignore[union-attr]
        if not metrics.built:
            zeros = [
                _match(np.zeros([1, *each.shape[1:]], each.dtype), np.zeros([1, *given.shape[1:]], given.dtype))
                for each, given in zip(expected, predicted)
            ]
            self._update_metrics(zeros)
        for metric in metrics.metrics:
            metric.reset_state()

    def _update_metrics(self, pairs: List[Tuple[Any, Any]], weights: Optional[Any] = None) -> None:
        targets, outputs = ([pair[place] for pair in pairs] for place in (0, 1))
        one = len(pairs) == 1
        self._probe.compiled_metrics.update_state(  # type: ignore[union-attr]
            targets[0] if one else targets,
            outputs[0] if one else outputs,
            None if weights is None else tf.convert_to_tensor(weights),
        )

    def _sum_metrics(self, world: World) -> Dict[str, Optional[float]]:
        found = {}
        for metric in self._probe.compiled_metrics.metrics:  # type: ignore[union-attr]
            for state in metric.weights:
                summed = world.sum_over_instances(np.asarray(state.numpy(), np.float64).reshape(-1).tolist())
                state.assign(tf.cast(tf.reshape(summed, state.shape), state.dtype))
            result: Any = np.asarray(metric.result(), np.float64)
            found[metric.name] = records.finite(float(result)) if not result.ndim else None
        return found


def _is_mean(metric: Any) -> bool:
    """Whether the result is the mean of what was counted, and nothing that is computed from it, like its root."""
    return isinstance(metric, tf.keras.metrics.Mean) and type(metric).result is tf.keras.metrics.Mean.result


def _callable(loss: Any) -> Any:
    return loss.call if isinstance(loss, tf.keras.losses.Loss) else loss


def _listed(outputs: Any) -> List[Any]:
    if isinstance(outputs, dict):
        return [outputs[name] for name in outputs]
    return list(outputs) if isinstance(outputs, (list, tuple)) else [outputs]


def _match(targets: Any, outputs: Any) -> Tuple[Any, Any]:
    """Returns targets in the rank of the outputs and, if they are floating-point numbers, in their type, as Keras."""
    if targets.ndim == 1 and outputs.ndim == 2:
        targets = targets[:, None]
    if targets.dtype.kind == "f":
        targets = targets.astype(outputs.dtype)
    return tf.convert_to_tensor(targets), tf.convert_to_tensor(outputs)
