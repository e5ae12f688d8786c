"""How instances that poprun has not started find each other."""

from __future__ import annotations

import contextlib
import http.client
import os
import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tf_ipu_dp.emulator.launcher import exit_notices, network, rendezvous, rendezvous_server

ALONE = {"CROSS_SIZE": 1, "SIZE": 2}


@given(st.integers(1, 8), st.integers(1, 8), st.sampled_from(["mpirun", "srun", "horovodrun", "nobody"]))
def test_ranks_are_those_of_the_launcher(on_host, on, launcher):
    size = on_host * on
    for rank in range(size):
        environ = {
            "mpirun": {
                "OMPI_COMM_WORLD_RANK": rank, "OMPI_COMM_WORLD_SIZE": size, "OMPI_COMM_WORLD_LOCAL_SIZE": on_host,
                "OMPI_COMM_WORLD_LOCAL_RANK": rank % on_host,
            },
            "srun": {
                "SLURM_PROCID": rank, "SLURM_NTASKS": size, "SLURM_STEP_TASKS_PER_NODE": f"{on_host}(x{on})",
                "SLURM_LOCALID": rank % on_host, "SLURM_NODEID": rank // on_host,
            },
            "horovodrun": {"HOROVOD_RANK": rank, "HOROVOD_SIZE": size, "HOROVOD_LOCAL_SIZE": on_host},
            "nobody": {},
        }[launcher]  # fmt: skip
        found = rendezvous.find_ranks({name: str(value) for name, value in environ.items()}, rank, size)
        local_size = size if launcher == "nobody" else on_host
        assert found == {
            "RANK": rank, "SIZE": size, "LOCAL_SIZE": local_size, "LOCAL_RANK": rank % local_size,
            "CROSS_RANK": rank // local_size, "CROSS_SIZE": size // local_size,
        }  # fmt: skip


def test_instances_that_alternate_between_hosts_are_refused_where_the_host_is_not_known():
    slurm = {"SLURM_PROCID": "1", "SLURM_NTASKS": "4", "SLURM_STEP_TASKS_PER_NODE": "2(x2)", "SLURM_LOCALID": "0"}
    told = rendezvous.find_ranks({**slurm, "SLURM_NODEID": "1"}, 1, 4)
    assert (told["LOCAL_RANK"], told["CROSS_RANK"]) == (0, 1)
    mpi = {f"OMPI_COMM_WORLD_{name}": value for name, value in (("RANK", "1"), ("SIZE", "4"), ("LOCAL_SIZE", "2"))}
    with pytest.raises(RuntimeError, match=r"Instance 1 is number 0 of 2 on its host.*mpirun --map-by slot"):
        rendezvous.find_ranks({**mpi, "OMPI_COMM_WORLD_LOCAL_RANK": "0"}, 1, 4)


def test_below_mpirun_in_a_slurm_job_it_is_mpirun_that_knows_the_hosts():
    """Its process on the second host was started by an srun of its own, whose first host that is."""
    slurm = {"SLURM_PROCID": "0", "SLURM_NODEID": "0", "SLURM_LOCALID": "0", "SLURM_STEP_TASKS_PER_NODE": "1"}
    mpi = {"RANK": "3", "SIZE": "4", "LOCAL_RANK": "1", "LOCAL_SIZE": "2"}
    ranks = rendezvous.find_ranks({**slurm, **{f"OMPI_COMM_WORLD_{name}": each for name, each in mpi.items()}}, 3, 4)
    assert (ranks["CROSS_RANK"], ranks["CROSS_SIZE"], ranks["LOCAL_RANK"]) == (1, 2, 1)


MPIRUN = {"OMPI_COMM_WORLD_SIZE": "2", "PMIX_SERVER_URI3": "1.0;tcp4://127.0.0.1:1"}


@pytest.mark.parametrize(
    ("environ", "by_mpi"),
    [
        (MPIRUN, True),
        ({"PMI_SIZE": "2", "MPI_LOCALRANKID": "0", "PMI_FD": "9"}, True),
        ({**MPIRUN, "HOROVOD_CONTROLLER": "gloo"}, False),
        ({"SLURM_PROCID": "0", "PMIX_SERVER_URI2": "x", "PMI_FD": "9"}, False),  # srun, of whatever MPI
        ({"SLURM_PROCID": "0", "HOROVOD_CONTROLLER": "MPI"}, True),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, False),  # poprun says it, too
        ({**MPIRUN, **rendezvous.variables("127.0.0.1", 1, "lo", "a")}, False),
        ({}, False),
    ],
)
def test_mpi_connects_what_mpirun_has_started_and_gloo_all_else_unless_the_user_asks(environ, by_mpi):
    assert rendezvous.connects_by_mpi(environ, built=True) is by_mpi
    if environ.get("HOROVOD_CONTROLLER") != "MPI":
        assert rendezvous.connects_by_mpi(environ, built=False) is False


def test_mpi_that_horovod_has_not_is_refused():
    with pytest.raises(RuntimeError, match="HOROVOD_CONTROLLER=mpi, but this Horovod was built without MPI"):
        rendezvous.connects_by_mpi({**MPIRUN, "HOROVOD_CONTROLLER": "mpi"}, built=False)


def test_every_job_has_a_port_of_its_own_that_its_instances_agree_on():
    jobs = [{"SLURM_JOB_ID": str(number), "SLURM_STEP_ID": "0"} for number in range(100)]
    places = {rendezvous.find_server(job, ALONE) for job in jobs}
    assert len(places) > 95 and all(address == network.LOOPBACK and 15_000 <= port < 32_000 for address, port in places)
    assert rendezvous.find_server(jobs[0], ALONE) == rendezvous.find_server(dict(jobs[0]), ALONE)
    assert rendezvous.find_server({}, ALONE) == rendezvous.find_server({}, ALONE)  # by their common parent


@pytest.mark.parametrize(
    ("environ", "ranks", "sentence"),
    [
        ({}, {"CROSS_SIZE": 2, "SIZE": 4}, "are on 2 hosts .* Set IPU_EMULATOR_RENDEZVOUS=HOST:PORT"),
        ({"IPU_EMULATOR_RENDEZVOUS": "here"}, ALONE, "is not an address like node0:29400"),
        (
            {"IPU_EMULATOR_RENDEZVOUS": "no.such.host.invalid:29400"},
            ALONE,
            "name no.such.host.invalid cannot be resolved",
        ),
    ],
)
def test_a_place_that_cannot_be_is_refused_in_a_sentence(environ, ranks, sentence):
    with pytest.raises(RuntimeError, match=sentence):
        rendezvous.find_server(environ, ranks)


def test_a_port_that_is_taken_is_named():
    pytest.importorskip("horovod")
    with socket.socket() as other:
        other.bind((network.LOOPBACK, 0))
        other.listen()
        place = f"{network.LOOPBACK}:{other.getsockname()[1]}"
        with pytest.raises(RuntimeError, match=f"Port {other.getsockname()[1]} is taken"):
            rendezvous.complete({"IPU_EMULATOR_RENDEZVOUS": place}, 0, 2)


def test_an_instance_0_that_does_not_come_is_not_waited_for_for_ever(monkeypatch):
    monkeypatch.setattr(rendezvous, "_TIMEOUT_S", 0.3)
    with pytest.raises(RuntimeError, match=r"Instance 0 did not answer at 127\.0\.0\.1 port 1 within"):
        rendezvous.complete({"IPU_EMULATOR_RENDEZVOUS": "127.0.0.1:1"}, 1, 2)


@pytest.fixture
def serve():
    """Starts a server for these hosts and their instances."""
    servers = []

    def start(slots=(("a", 2),), **options):
        servers.append(rendezvous_server.Server(slots, [network.LOOPBACK], **options))
        return servers[-1]

    yield start
    for server in servers:
        server.stop()


def ask(server, method, path, body=None, secret="", **headers):
    prefix = f"/{secret}:{server.port}" if secret else ""
    connection = http.client.HTTPConnection(network.LOOPBACK, server.port, timeout=60)
    with contextlib.closing(connection):
        connection.request(method, prefix + path, body, headers)
        answer = connection.getresponse()
        return answer.status, answer.read()


def test_addresses_are_forgotten_when_all_have_connected_even_if_groups_connect_at_the_same_time(serve):
    groups = [("global", 4), ("local_a", 2), ("local_b", 2), ("cross_0", 2), ("cross_1", 2)]
    server = serve([("a", 2), ("b", 2)])
    for _ in range(2):  # starts of Horovod
        for group, size in groups:
            for rank in range(size):
                assert ask(server, "PUT", f"/{group}/{rank}", b"address")[0] == 200
        for rank in range(4):
            for group, size in groups:
                if rank < size:
                    assert ask(server, "GET", f"/{group}/0") == (200, b"address")
                    assert ask(server, "DELETE", f"/{group}/{rank}")[0] == 200
        assert all(ask(server, "GET", f"/{group}/0")[0] == 404 for group, _ in groups)


def test_the_groups_of_process_sets_are_forgotten_key_by_key(serve):
    server, group = serve(), "global_process_set_hash_7d48533536350577"
    for key in ("rank_0", "0", "1"):
        assert ask(server, "PUT", f"/{group}/{key}", b"x")[0] == 200
    assert ask(server, "DELETE", f"/{group}/0")[0] == 200
    assert [ask(server, "GET", f"/{group}/{key}") for key in ("0", "1", "rank_0")] == [(404, b""), *[(200, b"x")] * 2]


def test_an_exit_notice_is_passed_on_before_it_is_answered(serve):
    noticed = []
    server = serve(on_exit_notice=noticed.append, secret="s3cret")
    environ = rendezvous.variables(network.LOOPBACK, server.port, "lo", "a", "s3cret")
    exit_notices.send(environ, 1)
    assert noticed == [1]
    exit_notices.send(environ, 2)  # there is no such instance
    exit_notices.send({**environ, "HOROVOD_GLOO_RENDEZVOUS_ADDR": network.LOOPBACK}, 0)  # forged
    assert noticed == [1]
    server.stop()
    exit_notices.send(environ, 0)  # the server is gone
    exit_notices.send({}, 0)
    assert noticed == [1]


@pytest.mark.parametrize("secret", ["", "wrong!", "s3cret0"])
def test_who_does_not_know_the_secret_can_neither_read_nor_write(serve, secret):
    server = serve(secret="s3cret")
    assert ask(server, "PUT", "/global/0", b"address", secret="s3cret") == (200, b"")
    for method in ("GET", "PUT", "DELETE"):
        assert ask(server, method, "/global/0", b"other", secret=secret) == (403, b"")
    assert ask(server, "GET", "/global/0", secret="s3cret") == (200, b"address")


@pytest.mark.parametrize("method", ["HEAD", "POST", "OPTIONS", "PATCH", "TRACE"])
def test_methods_that_horovod_does_not_use_are_refused(serve, method):
    assert ask(serve(), method, "/setup.cfg")[0] == 501


@pytest.mark.parametrize(
    "path",
    ["/", "/setup.cfg", "/other/0", "/global/2", "/global/-1", "/global/x", "/global/0/0", "/local_b/0", "/cross_2/0",
     "/global/../global/0", "/exiting/2", "/process_set_hash_0/0", "/global_process_set_hash_/0"],
)  # fmt: skip
def test_paths_that_are_not_of_this_job_are_refused(serve, path):
    server = serve()
    assert [ask(server, method, path, b"x")[0] for method in ("GET", "PUT", "DELETE")] == [400, 400, 400]


def test_bodies_are_bounded_and_what_is_too_long_is_not_read(serve):
    server = serve()
    with socket.create_connection((network.LOOPBACK, server.port), timeout=60) as client:
        client.sendall(b"PUT /global/0 HTTP/1.1\r\nContent-Length: 600000000\r\n\r\n")  # and nothing else
        assert client.recv(1 << 16).startswith(b"HTTP/1.0 413 ")
    for length in ("-1", "many", "9" * 30):
        assert ask(server, "PUT", "/global/0", **{"Content-Length": length})[0] == 411
    assert ask(server, "PUT", "/global/0", b"x" * 4096)[0] == 200
    assert ask(server, "PUT", "/global/0", b"x" * 40_960)[0] == 413


def test_process_sets_are_bounded_too(serve, monkeypatch):
    monkeypatch.setattr(rendezvous_server, "_MAX_PROCESS_SETS", 1)
    server = serve()  # with the groups global, local_a, cross_0 and cross_1
    put = [ask(server, "PUT", f"/global_process_set_hash_{number:x}/0", b"x")[0] for number in range(7)]
    assert put == [200] * 5 + [413] * 2


def test_connections_that_send_nothing_are_dropped(serve, monkeypatch):
    monkeypatch.setattr(rendezvous_server._Handler, "timeout", 0.2)
    server = serve()
    with socket.create_connection((network.LOOPBACK, server.port), timeout=60) as idle:
        assert idle.recv(1) == b""


def test_connections_that_send_half_a_request_keep_nobody_from_being_answered(serve):
    server = serve(secret="s")
    with contextlib.ExitStack() as stack:
        for _ in range(200):  # more than are served at once, without the secret
            idle = stack.enter_context(socket.create_connection((network.LOOPBACK, server.port), timeout=60))
            idle.send(b"GET /glo")
        assert ask(server, "PUT", "/global/0", b"x", secret="s")[0] == 200
        assert ask(server, "GET", "/global/0", secret="s") == (200, b"x")


def test_only_addresses_of_the_job_are_answered(serve):
    server = serve(peers={"192.0.2.1"})
    with pytest.raises((ConnectionError, http.client.HTTPException)):
        ask(server, "GET", "/global/0")


@pytest.mark.skipif(not os.path.exists("/proc/net/tcp"), reason="needs /proc/net/tcp")  # noqa: PTH110
def test_without_a_secret_a_connection_of_another_user_is_refused(serve, monkeypatch):
    server = serve()
    assert ask(server, "GET", "/global/0")[0] == 404
    own = os.geteuid()
    monkeypatch.setattr(rendezvous_server.os, "geteuid", lambda: own + 1)
    with pytest.raises((ConnectionError, http.client.HTTPException)):
        ask(server, "GET", "/global/0")


def test_a_server_has_the_same_port_at_all_its_addresses_and_at_no_other():
    server = rendezvous_server.Server([("a", 2)], ["127.0.0.1", "127.0.0.2"], secret="s")
    try:
        for address in ("127.0.0.1", "127.0.0.2"):
            socket.create_connection((address, server.port), timeout=60).close()
        with pytest.raises(OSError):
            socket.create_connection(("127.0.0.3", server.port), timeout=60)
    finally:
        server.stop()


def test_instance_0_under_another_launcher_asks_for_the_secret_that_launch_has_made():
    with socket.socket() as free:
        free.bind((network.LOOPBACK, 0))
        port = free.getsockname()[1]
    environ = {"IPU_EMULATOR_RENDEZVOUS": f"{network.LOOPBACK}:{port}/abc"}
    server = rendezvous.complete(environ, 0, 2)
    try:
        assert environ["HOROVOD_GLOO_RENDEZVOUS_ADDR"] == f"{network.LOOPBACK}:{port}/abc"
        assert ask(server, "GET", "/global/0")[0] == 403
        assert ask(server, "GET", "/global/0", secret="abc")[0] == 404
    finally:
        server.stop()
