"""What the IPUs are, and gc-monitor's view of them."""

from __future__ import annotations

import dataclasses

import pytest

from tf_ipu_dp.monitoring import devices, inventory, snapshots
from tf_ipu_dp.monitoring.text_layout import DisplayOptions


def ipu(number, **facts):
    device = {
        "id": str(number), "board ipu index": str(number % 4), "board type": "M2000", "ipu architecture": "ipu2",
        "board serial number": f"0001.{number // 4:04d}", "ipuof host": f"10.1.5.{number // 4}",
        "ipuof partition id": "p8",
        "ipuof server version": "1.11.0", "firmware version": "2.5.4", "ipuof routing id": "0",
        "ipuof routing type": "DNC", "clock": "1330MHz", **facts,
    }  # fmt: skip
    return devices.parse_device(device)


HELD = {"user name": "ann", "user process id": "4711"}
PROCESS = snapshots.Process(4711, "ann", "/usr/bin/python3 -m train", 42.0, (0, 1), "running", host="h")
SNAPSHOT = snapshots.Snapshot(
    0.0, "poplar", tuple(ipu(n, **(HELD if n < 2 else {})) for n in range(8)), (PROCESS,)
)  # fmt: skip


def test_a_board_is_one_row_and_a_column_without_a_value_is_left_out_and_said_below():
    assert inventory.render(SNAPSHOT, DisplayOptions(), each_ipu=False) == (
        "IPU  Partition  Machine   Serial     Type   Architecture  IPU#  Firmware  Server  Routing\n"
        "0-3  p8         10.1.5.0  0001.0000  M2000  ipu2          0-3   2.5.4     1.11.0  DNC 0\n"
        "4-7  p8         10.1.5.1  0001.0001  M2000  ipu2          0-3   2.5.4     1.11.0  DNC 0\n"
        "\n"
        "Left out, because it is not reported: Gateway, Driver.\n"
    )
    every = inventory.render(SNAPSHOT, DisplayOptions(), each_ipu=True).splitlines()
    assert [line.split()[0] for line in every[1:9]] == list("01234567")


def test_ipus_of_a_board_that_differ_have_rows_of_their_own():
    other = dataclasses.replace(SNAPSHOT, ipus=(ipu(0), ipu(1), ipu(2, **{"firmware version": "2.5.5"}), ipu(3)))
    lines = inventory.render(other, DisplayOptions(), each_ipu=False).splitlines()
    assert [line.split()[0] for line in lines[1:3]] == ["0-1,3", "2"]


def test_the_inventory_for_programs_has_what_does_not_change():
    value = inventory.to_json(SNAPSHOT)
    assert value["ipus"][5] == {
        "id": 5, "board_type": "M2000", "board_variant": None, "board_serial": "0001.0001", "board_ipu_index": 1,
        "architecture": "ipu2", "partition": "p8", "host": "10.1.5.1", "driver_version": None,
        "firmware_version": "2.5.4", "server_version": "1.11.0", "gateway_version": None, "routing_id": "0",
        "routing_type": "DNC",
    }  # fmt: skip
    assert {"server_version", "routing_type"} <= set(SNAPSHOT.to_json()["ipus"][0])


def test_gc_monitors_boxes_are_as_wide_as_the_terminal_and_say_what_is_not_shown():
    text = inventory.render_like_gc_monitor(SNAPSHOT, DisplayOptions(40))
    assert max(map(len, text.splitlines())) <= 40 and "~" not in text
    assert "Not shown at 40 columns: " in text and "Server version" in text.split("Not shown at")[1]


def test_people_who_know_gc_monitor_find_its_columns():
    text = inventory.render_like_gc_monitor(dataclasses.replace(SNAPSHOT, ipus=SNAPSHOT.ipus[:2]), DisplayOptions())
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"]
    assert rows[0] == ["gc-monitor view: partition p8 has 2 IPUs"]
    assert rows[1] == ["IPU-M", "Serial", "IPU-M SW", "Server version", "ICU FW", "Type", "ID", "IPU#", "Routing"]
    assert rows[2] == ["10.1.5.0", "0001.0000", "N/A", "1.11.0", "2.5.4", "M2000", "0", "0", "DNC"]
    assert rows[4] == ["Attached processes in partition p8"]
    assert rows[5] == ["PID", "Command", "Time", "User", "ID", "Clock", "Temp", "Board temp", "Board power"]
    assert rows[6] == ["4711", "python3", "00:00:42", "ann", "0", "1330MHz", "N/A", "N/A", "N/A"]
    assert len(rows) == 8 and len({len(line) for line in text.split("\n\n")[0].splitlines()}) == 1
    idle = dataclasses.replace(SNAPSHOT, processes=())
    assert "No attached processes in partition p8.\n" in inventory.render_like_gc_monitor(idle, DisplayOptions())


@pytest.mark.parametrize("width", [20, 40, 80, 120])
def test_both_fit_the_terminal(width):
    odd = dataclasses.replace(SNAPSHOT, ipus=(*SNAPSHOT.ipus, ipu(8, **{"board type": "M\x1b[31m日本"})))
    for text in (
        inventory.render(odd, DisplayOptions(width), each_ipu=False),
        inventory.render_like_gc_monitor(odd, DisplayOptions(width)),
    ):
        assert max(map(len, text.splitlines())) <= width and "\x1b" not in text


def test_devices_that_report_nothing_have_an_inventory_too():
    nothing = dataclasses.replace(SNAPSHOT, ipus=(devices.Ipu(), devices.Ipu(problem="gone")))
    for each_ipu in (True, False):
        assert isinstance(inventory.render(nothing, DisplayOptions(), each_ipu=each_ipu), str)
