"""Device attributes and health checks as typed records."""

from __future__ import annotations

import dataclasses
import json

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tf_ipu_dp.monitoring import devices

DEVICE = {
    "id": "3",
    "board ipu index": "3",
    "board type": "M2000",
    "board serial number": "0001.0002.8203321",
    "ipu architecture": "ipu2",
    "clock": "1330MHz",
    "ipu utilisation": "99.96%",
    "ipu utilisation (session)": "87.50 %",
    "ipu power": "40.9 W",
    "total board power": "N/A",
    "average board temp": "29.6 C",
    "ipu error state": "no errors",
    "link correctable error count": "0",
    "user name": "ann",
    "user process id": "4711",
    "user executable": "train",
    "process start time": "20211122T224648Z",
    "number of replicas": "8",
    "ipuof partition id": "p8",
}


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("1330MHz", 1330.0),
        ("40.9 W", 40.9),
        ("99.96%", 99.96),
        ("16 GT/s", 16.0),
        (" -4.5C ", -4.5),
        ("1e3", 1000.0),
        ("29.6 °C", 29.6),
        ("N/A", None),
        ("", None),
        ("%", None),
        ("1.2.3", None),
        ("20211122T224648Z", None),
        ("nan", None),
        ("1e999", None),
        ("12 of 16", None),
        (None, None),
    ],
)
def test_a_number_is_read_with_or_without_its_unit(text, number):
    assert devices.parse_number(text) == number


@given(st.floats(-1e9, 1e9), st.sampled_from(["", " ", "  "]), st.sampled_from(["MHz", "W", "C", "%", "GT/s", ""]))
def test_every_finite_number_survives_its_unit(number, blank, unit):
    assert devices.parse_number(f"{number}{blank}{unit}") == number


@given(st.dictionaries(st.sampled_from(sorted(DEVICE)), st.text() | st.sampled_from(["N/A", "٣ W", "1e400", "-", "²"])))
@example(dict.fromkeys(DEVICE, "N/A"))
def test_odd_attributes_become_numbers_texts_or_nothing(device):
    found = dataclasses.asdict(devices.parse_device(device))
    assert found.pop("other") == {}
    for field, value in found.items():
        assert value is None or type(value) in (int, float, str), field
        assert value not in ("", "N/A"), field


def test_a_device_is_read_with_its_units_and_the_rest_is_not_reported():
    known = {
        "id": 3, "board_ipu_index": 3, "board_type": "M2000", "board_serial": "0001.0002.8203321",
        "architecture": "ipu2", "clock_mhz": 1330.0, "utilisation_pct": 99.96, "session_utilisation_pct": 87.5,
        "power_w": 40.9, "board_temp_c": 29.6, "error_state": "no errors", "link_errors": 0, "user": "ann",
        "pid": 4711, "executable": "train", "start_time": "2021-11-22T22:46:48Z", "replicas": 8, "partition": "p8",
    }  # fmt: skip
    assert devices.parse_device(DEVICE) == devices.Ipu(**known)
    assert devices.parse_device({}) == devices.Ipu()


@given(st.dictionaries(st.text(), st.text()))
def test_attributes_without_a_field_are_kept_as_they_are(device):
    known = {**device, "id": "3"}
    assert devices.parse_device(known).other == {key: text for key, text in device.items() if key not in devices._KEYS}


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(ANYTHING | st.builds(json.dumps, st.fixed_dictionaries({"hosts": ANYTHING})))
def test_any_answer_of_the_health_check_becomes_a_list_of_lines(answer):
    assert all(isinstance(fault, str) and "\n" not in fault for fault in devices.parse_health(answer))


def test_the_faults_of_a_health_check_become_sentences():
    entry = {"error": "device", "id": 3, "partition": "p8", "board ipu index": 1}
    answer = {"hosts": {"10.1.5.1": [entry, {"error": "connection"}]}}
    assert devices.parse_health(json.dumps(answer)) == [
        "device error: IPU 3, partition p8, board IPU 1, host 10.1.5.1",
        "connection error: host 10.1.5.1",
    ]
    assert devices.parse_health("{}") == devices.parse_health("") == []
