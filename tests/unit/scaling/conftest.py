"""Fixtures for the tests of a study: a small job, its cells, and parts that stand in for engines and report."""

from __future__ import annotations

import dataclasses

import pytest

from tf_ipu_dp.config import train_flags
from tf_ipu_dp.datasets import info
from tf_ipu_dp.scaling import modes

NAMES = ("tf_ipu_dp", "tf_ipu_dp_mpi", "horovod", "ddp", "keras")


def is_ours(name):
    return name.startswith("tf_ipu_dp")


@pytest.fixture
def request_of():
    """Returns the request of a mode, with sizes, flags of train and fields of the request."""

    def make(mode, sizes, *words, **fields):
        config = train_flags.parse(["--model=mlp", *words])
        made = modes.Request(mode, tuple(sizes), "instances", 1, ("tf_ipu_dp",), config, info.DATASETS[config.dataset])
        return dataclasses.replace(made, **fields)

    return make


@pytest.fixture
def cells_of(request_of):
    """Returns the planned cells of a request."""
    return lambda *words, **fields: modes.plan_cells(request_of(*words, **fields), is_ours)
