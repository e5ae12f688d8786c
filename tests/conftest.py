"""What holds for all tests."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session", autouse=True)
def own_partition(tmp_path_factory):
    """Gives this process IPUs of its own, whoever else trains or tests on this machine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("IPU_EMULATOR_DIR", str(tmp_path_factory.mktemp("partition") / "of_tests"))
        yield
