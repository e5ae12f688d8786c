"""Emulated devices for tests."""

from __future__ import annotations

from pathlib import Path

import pytest

# They read the sources, documents and project files: the outcome is the same in every environment.
OF_SOURCES = (
    "test_containers.py", "test_docs.py", "test_flag_files.py", "test_layers.py", "test_project_files.py",
    "test_update_pins.py",
)  # fmt: skip


def pytest_collection_modifyitems(items):
    """Marks the tests that .ci/run runs in the default environment alone."""
    for item in items:
        if item.path.parent == Path(__file__).parent and item.path.name in OF_SOURCES:
            item.add_marker(pytest.mark.sources)


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
