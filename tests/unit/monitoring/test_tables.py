"""What the monitor shows, as whole text."""

from __future__ import annotations

import dataclasses
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tf_ipu_dp.monitoring import devices, process_table, selection, snapshots, tables, text_layout
from tf_ipu_dp.monitoring.text_layout import DisplayOptions
from tf_ipu_dp.runs.records import Verdict

IPU = devices.Ipu(
    id=0, board_type="M2000", board_serial="0001", clock_mhz=1330.0, utilisation_pct=99.96,
    session_utilisation_pct=87.5, power_w=40.94, board_power_w=114.7, board_temp_c=29.6, die_temp_c=31.24,
    error_state="no errors", host_link_errors=0, link_errors=0, user="ann", pid=4711,
)  # fmt: skip
IDLE = dataclasses.replace(
    IPU, id=1, utilisation_pct=0.0, session_utilisation_pct=0.0, power_w=None, die_temp_c=None, user=None, pid=None
)
SILENT = devices.Ipu(id=2, board_type="M2000", board_serial="0002", problem="link down")
PROCESS = snapshots.Process(
    pid=4711, user="ann", command="python -m tf_ipu_dp.train --ipus=1", elapsed_s=3725.0, ipus=(0,), state="running",
    run_dir="/runs/a", run="a", instance=0, instances=2, phase="training", step=120, planned_steps=640,
    samples_per_s=1842.4, waits_for="collective", host="here", loss=0.51234, eta_s=95.0, cpu_pct=143.6, memory_gib=1.25,
)  # fmt: skip
VERDICTS = {"/runs/a": Verdict("input", "Input is the bottleneck: 30 %.")}
EACH = selection.View(each_ipu=True)


def snapshot(*ipus, processes=(PROCESS,), sdk="poplar", **others):
    return snapshots.Snapshot(0.0, sdk, tuple(ipus), tuple(processes), **others)


def plain(text):
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


def test_the_tables_read_like_this_in_a_pipe():
    found = snapshot(IPU, IDLE, SILENT, verdicts=VERDICTS)
    assert tables.render(found, DisplayOptions(), EACH) == (
        "3 IPUs (Poplar SDK), 1 in use (100 % busy), 1 free, 1 not answering\n"
        "\n"
        "IPU  Board  Type   Clock MHz  Util %  Session %  Die C  Power W  Board C  Board W  Errors  Owner\n"
        "  0  0001   M2000      1,330   100.0       87.5   31.2     40.9     29.6    114.7  none    ann 4711\n"
        "  1                    1,330     0.0        0.0      -        -                    none    free\n"
        "  2  0002   M2000          -       -          -      -        -        -        -  -       "
        "no answer: link down\n"
        "\n"
        " PID  User      Time  IPUs  State     Run  Instance     Step  Done %       ETA    Loss  Samples/s  CPU %  "
        "Mem GiB  Waiting for  Command\n"
        "4711  ann   01:02:05  0     training  a      0 of 2  120/640    18.8  00:01:35  0.5123      1,842    144  "
        "   1.25  collective   python -m tf_ipu_dp.train --ipus=1\n"
        "\n"
        "a: Input is the bottleneck: 30 %.\n"
        "Left out, because there is no value: Input %.\n"
        "IPU 2 does not answer: link down.\n"
        "Power and temperature are reported only while an application runs.\n"
    )


def test_ipus_of_one_process_are_one_row_and_the_free_ones_one_line():
    other = dataclasses.replace(PROCESS, pid=12, user="bob", ipus=(4,), run_dir="/runs/b", run="b")
    ipus = [
        *(dataclasses.replace(IPU, id=n, utilisation_pct=90.0 + n, board_serial=f"000{n // 2}") for n in range(4)),
        dataclasses.replace(IPU, id=4, pid=12, user="bob", board_serial="0002"),
        *(dataclasses.replace(IDLE, id=n, board_serial="0003") for n in (5, 6, 7)),
        *(dataclasses.replace(SILENT, id=n, board_serial="0004") for n in (8, 9)),
    ]
    holder = dataclasses.replace(PROCESS, ipus=(0, 1, 2, 3))
    text = tables.render(snapshot(*ipus, processes=[holder, other]), DisplayOptions())
    assert text.split("\n\n")[1] == (
        "IPU  Board     Type   Clock MHz  Util %  Session %  Die C  Power W  Board C  Board W  Errors  Owner\n"
        "0-3  2 boards  M2000      1,330    91.5       87.5   31.2    163.8     29.6    229.4  none    ann 4711\n"
        "  4  0002      M2000      1,330   100.0       87.5   31.2     40.9     29.6    114.7  none    bob 12\n"
        "8-9  0004      M2000          -       -          -      -        -        -        -  -       "
        "no answer: link down\n"
        "free: IPU 5-7"
    )
    every = tables.render(snapshot(*ipus, processes=[holder, other]), DisplayOptions(), EACH)
    assert len(re.findall(r"^ +\d+  .*(ann 4711|bob 12|free|link down)$", every, re.MULTILINE)) == 10


def test_a_process_on_another_host_with_the_same_number_takes_no_ipus():
    elsewhere = dataclasses.replace(PROCESS, host="there", ipus=(), instance=1, cpu_pct=None, memory_gib=None)
    text = tables.render(snapshot(IPU, processes=[PROCESS, elsewhere]), DisplayOptions())
    first, second = (line for line in text.splitlines() if line.startswith("4711"))
    assert re.match(r"4711  here   ann .* 0 of 2 ", first) and re.match(r"4711  there  ann .* 1 of 2 ", second)
    assert "IPUs, CPU and memory are known only for processes on this host.\n" in text


def test_a_column_without_a_value_is_left_out_and_said_below():
    bare = dataclasses.replace(IPU, power_w=None, board_power_w=None, die_temp_c=None, board_temp_c=None)
    text = tables.render(snapshot(bare), DisplayOptions())
    assert text.splitlines()[2].split() == [
        "IPU",
        "Board",
        "Type",
        "Clock",
        "MHz",
        "Util",
        "%",
        "Session",
        "%",
        "Errors",
        "Owner",
    ]
    assert "Left out, because there is no value: Input %, Die C, Power W, Board C, Board W.\n" in text
    assert "need GCDA_MONITOR=1" in text


@pytest.mark.parametrize(("width", "shown"), [(40, "PID IPUs State Run Step"), (80, "Step ETA Loss Samples/s")])
def test_a_narrow_terminal_keeps_the_name_of_the_run_and_says_what_it_leaves_out(width, shown):
    process = dataclasses.replace(PROCESS, command="/opt/poplar/venv/bin/python3.8 -m tf_ipu_dp.train --ipus=1")
    text = tables.render(snapshot(IPU, processes=[process]), DisplayOptions(width))
    header = next(line for line in text.splitlines() if "PID" in line)
    assert shown in " ".join(header.split()) and "Command" not in header
    assert max(map(len, text.splitlines())) <= width
    said = " ".join(text.split("Not shown at ")[1].split())
    assert said.startswith(f"{width} columns: ") and said.endswith("Command. A pipe and --json have all.")
    foreign = snapshots.Process(4711, "ann", process.command, 3725.0, (0,), "running", host="here", memory_gib=1.0)
    wide = tables.render(snapshot(IPU, processes=[foreign]), DisplayOptions(80))
    assert "python3.8 -m tf_ipu" in wide and "/opt/poplar" not in wide, "the interpreter's folder goes"


def test_a_long_name_of_a_run_does_not_push_out_the_other_columns():
    process = dataclasses.replace(PROCESS, run="resnet50-imagenet-fine-tuning-with-a-very-long-name")
    text = tables.render(snapshot(IPU, processes=[process]), DisplayOptions(80))
    assert "  resnet50-imagenet-f~  120/640" in text
    assert process.run in tables.render(snapshot(IPU, processes=[process]), DisplayOptions())


@pytest.mark.parametrize(
    ("command", "shown"),
    [
        ("/usr/bin/python3.11 -m x", "python3.11 -m x"),
        ("/opt/pypy3 a.py /data/python b", "pypy3 a.py /data/python b"),
        ("/opt/my dir/python -m x", "/opt/my dir/python -m x"),
        ("/usr/bin/train /a/python", "/usr/bin/train /a/python"),
        ("python", "python"),
    ],
)
def test_only_the_folder_of_the_interpreter_is_stripped(command, shown):
    assert process_table.shorten_command(command) == shown


def test_a_filter_shows_its_processes_with_their_ipus_and_counts_them():
    other = dataclasses.replace(PROCESS, pid=12, user="bob", ipus=(1,), run_dir="/runs/b", run="b")
    held = dataclasses.replace(IPU, id=1, pid=12, user="bob")
    found = snapshot(IPU, held, IDLE, processes=[PROCESS, other], verdicts=VERDICTS)
    text = tables.render(found, DisplayOptions(), selection.View(user="bob"))
    assert text.startswith("3 IPUs (Poplar SDK), 2 in use (100 % busy), 1 free\n")
    assert "bob 12" in text and "ann" not in text and "free: " not in text and "Input is" not in text
    assert "--user=bob: 1 of 2 processes shown.\n" in text
    nobody = tables.render(found, DisplayOptions(), selection.View(user="eve"))
    assert "No process of --user=eve holds IPUs. Those that do: --user=ann, --user=bob.\n" in nobody


def test_the_help_of_the_live_view_names_its_keys_and_fits():
    shown = tables.render_help_screen(DisplayOptions(40), 30)
    assert len(shown) == 30 and max(map(len, shown)) <= 40 and not any("~" in line for line in shown)
    assert [line.split()[0] for line in shown[2:6]] == ["q", "p", "s", "h"]
    assert len(tables.render_help_screen(DisplayOptions(20), 5)) == 5


def test_missing_power_of_an_ipu_in_use_is_explained():
    text = tables.render(snapshot(dataclasses.replace(IPU, power_w=None)), DisplayOptions())
    assert text.count("GCDA_MONITOR=1") == 1


def test_values_of_a_board_are_shown_once_whichever_of_its_ipus_reports_them():
    mute = dataclasses.replace(IPU, board_temp_c=None, board_power_w=None)
    text = tables.render(snapshot(mute, IDLE, dataclasses.replace(SILENT, board_serial="0001")), DisplayOptions(), EACH)
    assert re.search(r"^  0 .* 29\.6 +114\.7  none ", text, re.MULTILINE)
    assert text.count("29.6") == text.count("114.7") == 1 and "GCDA" not in text


def test_values_of_a_board_are_shown_once_around_a_device_without_a_known_board():
    unknown = dataclasses.replace(IDLE, id=1, board_serial=None, board_temp_c=1.0, board_power_w=2.0)
    text = tables.render(snapshot(IPU, unknown, dataclasses.replace(IPU, id=2)), DisplayOptions(), EACH)
    assert text.count("29.6") == text.count("114.7") == text.count("0001") == 1


def test_every_dash_has_its_reason():
    bare = dataclasses.replace(IPU, clock_mhz=None, board_type=None, session_utilisation_pct=None, power_w=None)
    bare = dataclasses.replace(bare, error_state=None, host_link_errors=None, link_errors=None, user=None)
    runs = [dataclasses.replace(PROCESS, samples_per_s=None, waits_for=None), dataclasses.replace(PROCESS, run=None)]
    idle = dataclasses.replace(IDLE, board_serial="0002")
    text = tables.render(snapshot(bare, idle, processes=runs), DisplayOptions(), EACH)
    titles = "Type, Clock MHz, Session %, Errors, Owner"
    assert f"A dash means that the driver does not report the value: {titles}.\n" in text
    for reason in (
        "need GCDA_MONITOR=1",
        "only while an application runs",
        "this user's tf_ipu_dp runs",
        "after the first",
    ):
        assert text.count(reason) == 1, reason
    assert "What a run is waiting for is reported by the emulator, but not by the Poplar SDK" in text


def test_an_emulated_ipu_that_was_just_attached_is_not_called_unreported():
    new = dataclasses.replace(IPU, board_variant="emulated", utilisation_pct=None, session_utilisation_pct=None)
    text = tables.render(snapshot(new, sdk="emulator"), DisplayOptions())
    assert "is known one second after a process attaches" in text and "the driver" not in text


def test_the_emulator_says_so_and_why():
    emulated = dataclasses.replace(IDLE, board_variant="emulated")
    text = tables.render(snapshot(emulated, processes=(), sdk="emulator", note="no SDK"), DisplayOptions())
    assert "Emulated: these IPUs are this host's CPU; no SDK.\n" in text and "GCDA" not in text


@pytest.mark.parametrize(
    ("changes", "state"),
    [
        ({}, "training"),
        ({"state": "stale", "silent_s": 7.4}, "stale 7 s"),
        ({"state": "gone"}, "gone"),
        ({"phase": None}, "running"),
    ],
)
def test_a_process_is_shown_in_its_state(changes, state):
    text = tables.render(snapshot(IPU, processes=[dataclasses.replace(PROCESS, **changes)]), DisplayOptions())
    assert re.search(rf"01:02:05  0 +{state} +a ", text)


def test_a_stale_process_has_a_note_with_its_number_and_the_time_since_its_last_heartbeat():
    stale = dataclasses.replace(PROCESS, state="stale", silent_s=7.4)
    text = tables.render(snapshot(IPU, processes=[stale]), DisplayOptions())
    assert "No heartbeat for 7 s: process 4711 or its host is stopped or stuck.\n" in text


@given(st.text(min_size=1, max_size=30), st.text(max_size=30), st.text(max_size=30))
def test_nothing_in_a_name_a_phase_or_a_command_moves_the_cursor_or_hides(user, phase, command):
    process = dataclasses.replace(PROCESS, user=user, phase=phase, command=f"x{command}")
    text = tables.render(snapshot(dataclasses.replace(IPU, user=user), processes=[process]), DisplayOptions())
    assert all(each == "\n" or each.isprintable() for each in text)
    assert len(text.splitlines()) == len(tables.render(snapshot(IPU), DisplayOptions()).splitlines())


def test_control_characters_and_markup_are_shown_as_they_are_written():
    process = dataclasses.replace(PROCESS, command="rm \x1b[31m[red]x[/red]\n\u202e")
    assert "rm \\x1b[31m[red]x[/red]\\n\\u202e\n" in tables.render(snapshot(IPU, processes=[process]), DisplayOptions())


def test_on_a_terminal_there_are_bars_and_colours_and_no_line_is_too_long():
    text = tables.render(snapshot(IPU, IDLE, SILENT), DisplayOptions(width=120, bars=True, colour=True))
    assert "\x1b[32m████████\x1b[0m" in text and max(map(len, plain(text).splitlines())) <= 120
    narrow = plain(tables.render(snapshot(IPU, IDLE, SILENT), DisplayOptions(width=60, bars=True, colour=True)))
    assert max(map(len, narrow.splitlines())) <= 60
    assert all(title in narrow for title in ("Util %", "Owner", "Run", "Step"))
    ascii_only = tables.render(snapshot(IPU), DisplayOptions(width=120, bars=True, unicode=False))
    assert ascii_only.isascii() and "########" in ascii_only


def many(count, busy):
    return [dataclasses.replace(IPU if n < busy else IDLE, id=n, board_serial=f"{n // 4:04d}") for n in range(count)]


@settings(max_examples=60)
@given(
    width=st.integers(1, 250), height=st.integers(1, 100), count=st.sampled_from([1, 4, 64]), busy=st.integers(0, 64),
    processes=st.integers(0, 6), unicode=st.booleans(),
)  # fmt: skip
def test_a_screen_has_exactly_its_height_and_never_more_than_its_width(width, height, count, busy, processes, unicode):
    rows = [dataclasses.replace(PROCESS, pid=n, command="日本 " * 30) for n in range(processes)]
    history = {n: [50.0, None, 100.0] for n in range(count)}
    options = DisplayOptions(width=width, bars=True, unicode=unicode)
    shown = tables.render_screen(
        snapshot(*many(count, busy), processes=rows, verdicts=VERDICTS),
        options,
        height,
        history,
        "q quit",
    )
    assert len(shown) == max(height, 4) and shown[-1].startswith("q quit")
    if unicode:
        assert max(map(text_layout.cell_width, shown)) <= max(width, 20)


def test_a_small_screen_shows_every_busy_ipu_and_names_the_free_ones():
    rows = tables.render_screen(snapshot(*many(64, 8)), DisplayOptions(120), 30, {0: [1.0]}, "")
    assert "free: IPU 8-63" in rows and any(row.startswith("  7 ") for row in rows)
    grid = tables.render_screen(snapshot(*many(64, 64)), DisplayOptions(120), 30, {}, "")
    assert {int(each) for each in re.findall(r"(\d+) +\d+\.\d\b", "\n".join(grid[2:]))} >= set(range(64))
    hopeless = tables.render_screen(snapshot(*many(64, 64)), DisplayOptions(20), 8, {}, "")
    assert " ".join(hopeless[2:5]) == "The terminal is too small for all IPUs; --json lists them."
    assert hopeless[6].startswith("4711  0 ")


@pytest.mark.parametrize(("width", "height"), [(80, 10), (80, 16), (80, 24), (30, 12), (20, 4), (22, 9), (200, 12)])
@pytest.mark.parametrize("ipus", [4, 64])
def test_a_screen_shows_as_many_processes_as_fit_and_counts_the_others(width, height, ipus):
    runs = [dataclasses.replace(PROCESS, pid=5000 + n) for n in range(14)]
    shown = tables.render_screen(
        snapshot(*many(ipus, ipus), processes=runs), DisplayOptions(width), height, {}, "q quit"
    )
    listed = sum(row.startswith("50") for row in shown)
    said = re.fullmatch(r"and (\d+)(?: more)? process(?:es)?", shown[-2])
    assert listed + (int(said[1]) if said else 0) == 14
    assert not (said and listed) or "" not in shown, "no line is left empty while something is left out"


def test_faults_are_shown_with_the_last_event():
    assert tables.render_health(["IPU 3: parity"], {"severity": "error", "pid": "1"}, "/e", 4, False) == (
        "fault  IPU 3: parity\n\nLast application event\n  severity  error\n  pid       1\n"
    )
    assert tables.render_health([], {}, None, 1, True).startswith("1 IPU checked, no faults found.\n")
