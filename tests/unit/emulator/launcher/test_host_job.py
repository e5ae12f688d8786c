"""The part of a job that one host runs."""

from __future__ import annotations

import json

from tf_ipu_dp.emulator.launcher import failure_report, host_job, host_messages, orphans, processes, supervisor


def test_the_job_of_a_host_survives_the_way_there():
    job = host_job.HostJob(["python3", "x.py"], "/tmp", {"A": "1"}, {2: {"B": "2"}, 3: {}}, True, ("10.0.0.1", 9), "b")
    kind, value = host_messages.decode(host_messages.encode("job", job.to_json()))
    again = host_job.HostJob.from_json(value)
    assert kind == "job" and json.dumps(again.to_json()) == json.dumps(job.to_json())
    assert list(again.instances) == [2, 3]


def test_variables_for_poprun_itself_are_not_passed_to_its_instances(monkeypatch):
    for name in (failure_report.FILE_VARIABLE, orphans.JOB_VARIABLE, "OTHER"):
        monkeypatch.setenv(name, "x")
    environ = host_job.inherited_environment()
    assert environ["OTHER"] == "x"
    assert failure_report.FILE_VARIABLE not in environ and orphans.JOB_VARIABLE not in environ


def test_a_failure_is_reported_with_its_host_where_there_are_several():
    killed = supervisor.Failure(137, processes.Exit.from_code(3, -9), "b")
    assert failure_report.render(killed, instances=4, hosts=2) == (
        "instance 3 on host b was killed by SIGKILL; the other instances were stopped."
    )
    exited = supervisor.Failure(7, processes.Exit.from_code(0, 7), "a")
    assert failure_report.render(exited, instances=1, hosts=1) == "instance 0 exited with status 7."
