"""Emulated devices for tests."""

from __future__ import annotations

import pytest


@pytest.fixture
def scope(emulator_dir):
    """Configures so many IPUs of the test's own partition and returns a strategy on them."""
    from tf_ipu_dp.emulator.sdk_api.ipu import config as ipu_config
    from tf_ipu_dp.emulator.sdk_api.ipu import ipu_strategy

    def configure(ipus):
        config = ipu_config.IPUConfig()
        config.auto_select_ipus = ipus
        config.configure_ipu_system()
        return ipu_strategy.IPUStrategy()

    yield configure
    ipu_config.reset_ipu_configuration()
