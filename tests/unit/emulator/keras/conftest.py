"""A fixture for tests of pipelines."""

from __future__ import annotations

import pytest
import tensorflow as tf

from tf_ipu_dp.emulator.keras import models
from tf_ipu_dp.emulator.sdk_api.ipu import config as ipu_config
from tf_ipu_dp.emulator.sdk_api.ipu import ipu_strategy


@pytest.fixture
def two_ipus(emulator_dir):
    """The scope of a strategy on two IPUs."""
    config = ipu_config.IPUConfig()
    config.auto_select_ipus = 2
    config.configure_ipu_system()
    models.extend_keras()
    tf.keras.backend.clear_session()
    with ipu_strategy.IPUStrategy().scope():
        yield
    ipu_config.reset_ipu_configuration()
