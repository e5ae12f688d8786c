"""What holds for all tests."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings

# A loaded machine may be slow, and fails no test by that.
settings.register_profile("tests", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True)
settings.load_profile("tests")


@pytest.fixture(scope="session", autouse=True)
def own_partition(tmp_path_factory):
    """Gives this process IPUs of its own, whoever else trains or tests on this machine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("IPU_EMULATOR_DIR", str(tmp_path_factory.mktemp("partition") / "of_tests"))
        yield


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Hands out the files that start processes early: they have few tests, and xdist leaves such files to the end."""
    from xdist.scheduler import LoadFileScheduling

    class LongFilesFirst(LoadFileScheduling):
        def schedule(self):
            super().schedule()
            for file in [file for file in reversed(self.workqueue) if "integration" in file]:
                self.workqueue.move_to_end(file, last=False)

    return LongFilesFirst(config, log) if config.getvalue("dist") == "loadfile" else None
