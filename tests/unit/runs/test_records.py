"""Every record survives JSON, what is no record is refused, and the files of release 0.1 still load."""

from __future__ import annotations

import dataclasses
import json
import shutil
import typing
from pathlib import Path

import pytest
import sample_records
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tf_ipu_dp.runs import checkpoints, heartbeat, manifest, plan_record, records, run_folder

SCHEMA_1 = Path(__file__).parent / "schema_1"


def all_record_types(base=records.Record):
    for kind in base.__subclasses__():
        yield kind
        yield from all_record_types(kind)


KINDS = sorted(all_record_types(), key=lambda kind: kind.__name__)


def values_of(kind):  # noqa: PLR0911
    """Returns a strategy for the values of an annotation."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Union:
        return st.none() | values_of(arguments[0])
    if origin is tuple and arguments[-1] is Ellipsis:
        return st.lists(values_of(arguments[0]), max_size=2).map(tuple)
    if origin is tuple:
        return st.tuples(*map(values_of, arguments))
    if origin is dict:
        return st.dictionaries(st.text(max_size=4), values_of(arguments[1]), max_size=2)
    if dataclasses.is_dataclass(kind):
        return instances_of(kind)
    if kind is float:
        return st.floats(-1e9, 1e9)
    return {int: st.integers(), str: st.text(max_size=8), bool: st.booleans()}[kind]


def instances_of(kind):
    hints = typing.get_type_hints(kind)
    return st.builds(kind, **{field.name: values_of(hints[field.name]) for field in dataclasses.fields(kind)})


def test_the_records_of_a_runs_folder_are_among_those_that_are_tested():
    tested = {
        records.TrainingRecord, records.ValidationRecord, records.InstanceTimes, records.Scores, records.RunResult,
        records.RunTimes, records.Verdict, records.StopReason, plan_record.PlanRecord, manifest.Manifest,
        heartbeat.Status,
    }  # fmt: skip
    assert tested <= set(KINDS)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@settings(max_examples=25, suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(data=st.data())
def test_every_record_survives_json(kind, data):
    record = data.draw(instances_of(kind))
    value = json.loads(json.dumps(record.to_json(), allow_nan=False))
    assert value["schema"] == kind.SCHEMA
    found = kind.from_json(value)
    if kind is heartbeat.Status:  # keeps only phases whose times are plausible
        record = dataclasses.replace(record, changes=found.changes)
    assert found == record


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@settings(max_examples=25, suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(data=st.data())
def test_a_value_of_another_type_is_refused_or_fits(kind, data):
    value = data.draw(instances_of(kind)).to_json()
    key = data.draw(st.sampled_from(sorted(value)))
    value[key] = data.draw(JSON)
    try:
        found = kind.from_json(value)
    except records.RecordError as error:
        assert str(error)
    else:
        assert isinstance(found, kind)


@given(JSON)
def test_whatever_is_no_object_of_the_kind_is_refused(value):
    with pytest.raises(records.RecordError):
        records.RunResult.from_json(value)


def test_a_newer_schema_is_refused_with_its_number():
    value = {**sample_records.make_result().to_json(), "schema": 99}
    with pytest.raises(records.RecordError, match="is of schema 99; this version reads 1 to 2"):
        records.RunResult.from_json(value)


def test_keys_that_are_not_known_are_ignored():
    value = {**sample_records.make_validation(3).to_json(), "later": 1}
    assert records.metrics_record(value) == sample_records.make_validation(3)


def test_what_is_not_finite_is_null():
    assert records.finite(float("nan")) is None and records.finite(float("inf")) is None
    times = dataclasses.replace(sample_records.TIMES, input_wait_s=float("nan"))
    assert times.to_json()["input_wait"] is None


def test_the_parts_of_the_time_sum_to_the_total():
    value = sample_records.make_result().to_json()["seconds"]
    parts = ("compile", "executing", "between_executions", "logging_and_checkpoints", "evaluation", "overhead")
    assert sum(value[name] for name in parts) == pytest.approx(value["total"])
    assert sum(value[name] for name in parts[1:4]) == pytest.approx(value["training"])


def with_keys_of(old, value):
    """Returns a JSON value without the keys that an older one does not have."""
    if isinstance(old, dict):
        return {key: with_keys_of(each, value[key]) for key, each in old.items()}
    if isinstance(old, list):
        assert len(old) == len(value)
        return [with_keys_of(each, new) for each, new in zip(old, value)]
    return value


@pytest.mark.parametrize("name", ["two_instances", "pipeline", "stopped"])
def test_the_files_of_release_0_1_still_load(name, tmp_path):
    folder = run_folder.RunFolder(SCHEMA_1 / name)
    raw_plan = json.loads(folder.plan_json.read_text())
    planned = folder.read_plan()
    assert planned.version == "0.1.0" and planned.to_json() == raw_plan
    lines = folder.metrics.read_text().splitlines()
    metrics = folder.read_metrics()
    assert len(metrics) == len(lines) > 1
    for line, record in zip(lines, metrics):
        raw = json.loads(line)
        assert with_keys_of(raw, record.to_json()) == raw
    raw_result = json.loads(folder.result_json.read_text())
    result = folder.read_result()
    assert result.updates == raw_result["updates"] and result.verdict.sentence == raw_result["verdict"]
    assert result.times.total_s == raw_result["seconds"]["total"]
    assert result.scores is None or result.scores.top1 == raw_result["validation"]["top1"]
    assert result.is_finished is (raw_result["stopped"] is None)
    shutil.copy(folder.path / "manifest.json", tmp_path / "manifest.json")
    with pytest.raises(checkpoints.CheckpointError, match=r"state\.\S+ is missing"):  # which comes after the manifest
        checkpoints.open_checkpoint(tmp_path)
    sealed = json.loads((folder.path / "manifest.json").read_text())["manifest"]
    found = manifest.Manifest.from_json(sealed)
    assert found.step == sealed["step"] and found.plan == planned and len(found.variables) == len(sealed["variables"])


def test_a_heartbeat_and_an_error_of_release_0_1_still_load():
    folder = SCHEMA_1 / "stopped"
    (status,) = heartbeat.read_run(folder)
    assert (status.step, status.host, status.phase, len(status.changes)) == (312, "node07", "training", 7)
    (error,) = run_folder.RunFolder(folder).read_errors()
    assert (error.instance, error.transient, error.text) == (1, False, "--dataset=mnist cannot be read.")


def test_a_result_of_no_replicas_has_no_throughput_per_replica():
    result = dataclasses.replace(sample_records.make_result(), replicas=0)
    assert result.samples_per_s is not None and result.to_json()["samples_per_s_per_replica"] is None
