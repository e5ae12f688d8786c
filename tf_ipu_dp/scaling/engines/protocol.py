"""What a program of another engine is asked to train, and what each of its processes answers. Pure.

An order is a JSON file whose path is the program's only argument; process RANK writes `answer-RANK.json` beside it.
"""

from __future__ import annotations

import dataclasses
from typing import Optional, Tuple

from tf_ipu_dp.runs.records import Record


@dataclasses.dataclass(frozen=True)
class Order(Record):
    """The same model, data order and global batch for every engine."""

    model: str
    norm: str
    dataset: str
    data_dir: Optional[str]
    image_size: Optional[int]
    batch_size: int  # of one process in one update
    processes: int
    warmup_updates: int
    updates: int  # timed ones, after the warm-up
    learning_rate: float
    momentum: float
    weight_decay: float
    seed: int
    threads: int  # of one process
    weights: Optional[str] = None  # an .npz to start from: arrays by the names of the Keras model's variables
    l2: float = 0.0
    label_smoothing: float = 0.0
    samples: str = ""  # the folder with the arrays of the training samples; `starter.run` fills it in
    together: int = 1  # programs that train at once, each a job of its own, and begin to be timed together
    times_updates: bool = False  # each of them, for a calibration
    most_s: Optional[float] = None  # of timed updates, but at least three; None: all of them. One process only


@dataclasses.dataclass(frozen=True)
class Answer(Record):
    """What one process measured."""

    rank: int
    engine: str  # with versions
    seconds: float  # of the timed updates
    samples: int  # of this process, in the timed updates
    first_loss: float
    input_wait_s: Optional[float] = None
    collective_s: Optional[float] = None
    mean_loss: Optional[float] = None  # of all updates, the warm-up included; of this process's samples
    update_s: Tuple[float, ...] = ()  # of each timed update, if the order asks for them
