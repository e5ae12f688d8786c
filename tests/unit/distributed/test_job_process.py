"""How processes that were started are ended."""

from __future__ import annotations

import subprocess
import sys

from tf_ipu_dp.distributed import job_process


def test_a_process_that_does_not_listen_is_made_to_end(monkeypatch):
    monkeypatch.setattr(job_process, "_STOP_S", 0.2)
    program = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(1, flush=True); signal.pause()"
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, start_new_session=True) as process:
        process.stdout.readline()
        job_process.stop_session(process)
        assert process.returncode == -9
