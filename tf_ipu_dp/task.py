"""What functions of users return besides plain Keras models and arrays: `Task` and `Data`. No TensorFlow, no numpy."""

from __future__ import annotations

import dataclasses
from typing import Any, Mapping, Optional, Sequence


@dataclasses.dataclass(frozen=True)
class Task:
    """A model with its loss and metrics: what a function of --model returns for anything but plain classification.

    Losses and metrics are those of Keras, in the forms that `model.compile` takes: a name, a function of targets and
    outputs, an object, or a list or dictionary of these with one for each output. A loss is a mean over the samples
    (Keras' default reduction). Without a loss the task is classification: targets are class numbers, and the one
    output has a logit, or after a softmax a probability, for each class.
    """

    model: Any
    loss: Any = None
    metrics: Any = None
    loss_weights: Any = None
    weighted_metrics: Any = None  # as `metrics`, but they count each sample by its weight, where the data has weights


@dataclasses.dataclass(frozen=True)
class Data:
    """Training and validation data: what a function of --dataset returns if a pair of pairs does not say enough.

    `train` and `validation` are pairs (inputs, targets) of arrays, or of dictionaries or tuples of arrays, or
    tf.data datasets of single samples (inputs, targets). A third member is the weights of the samples, one number
    each: the loss is the mean of the weighted losses, as in Keras. Without a validation, a seeded share of the training
    arrays is held out (--validation_split). `train_samples` and `validation_samples` are the lengths of datasets
    that do not know theirs. `facts` are further values that the function of --model can ask for by name, such as the
    size of a vocabulary: numbers, texts, and lists of these.
    """

    train: Any
    validation: Any = None
    classes: Optional[int] = None
    class_names: Sequence[str] = ()
    train_samples: Optional[int] = None
    validation_samples: Optional[int] = None
    facts: Mapping[str, Any] = dataclasses.field(default_factory=dict)
