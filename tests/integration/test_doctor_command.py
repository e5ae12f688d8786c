"""The doctor on this very machine, and on one whose TensorFlow is broken."""

from __future__ import annotations

import functools
import json

import pytest

from tf_ipu_dp.environment import versions


@pytest.fixture
def doctor(run_command):
    return functools.partial(run_command, "doctor")


@pytest.mark.slow
def test_the_test_environment_is_ready_and_horovod_is_built_with_gloo(doctor):
    done = doctor("--json")
    value = json.loads(done.stdout)
    assert done.returncode == 0 and value["ready"] and value["sdk"] == "emulator"
    findings = {finding["name"]: finding for finding in value["findings"]}
    assert findings["TensorFlow"]["detail"] == f"{versions.of_python().tensorflow}, stock"
    assert "0.28.1 with Gloo" in findings["Horovod"]["detail"]
    assert findings["tensorflow-datasets"]["ok"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("raise ImportError('broken wheel')", "ImportError: broken wheel"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGILL)", "the interpreter was killed by SIGILL"),
    ],
)
def test_a_tensorflow_that_fails_or_kills_the_interpreter_is_reported(tmp_path, source, reason, doctor):
    (tmp_path / "tensorflow").mkdir()
    (tmp_path / "tensorflow" / "__init__.py").write_text(source, encoding="utf-8")
    done = doctor(PYTHONPATH=str(tmp_path))
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert f"✗  TensorFlow           {reason}" in done.stdout
    assert done.stdout.endswith("Not ready: train cannot start here.\n")


@pytest.mark.slow
def test_every_call_of_a_run_is_made_on_the_emulator_and_accepted(doctor, emulator_dir):
    done = doctor("--sdk=emulator", "--json")
    value = json.loads(done.stdout)
    assert done.returncode == 0 and value["ok"] and value["sdk"] == "emulator", done.stdout
    names = ["1 replica", "2 replicas", "a pipeline of 2 stages", "2 replicas in 16 bits"]
    assert [run["run"] for run in value["runs"]] == names
    for run in value["runs"]:
        calls = [call["name"] for call in run["calls"]]
        assert calls[0] == "gcipuinfo.gcipuinfo().getDevices()" and calls[-1] == "model.export_for_ipu_serving()"
        assert "model.fit()" in calls and "model.predict()" in calls and all(call["ok"] for call in run["calls"])


@pytest.mark.slow
def test_a_call_that_the_sdk_refuses_is_shown_in_its_words(doctor, emulator_dir):
    done = doctor("--sdk=emulator", "--", "--model=mlp", "--dataset=synthetic", "--ipus=8", IPU_EMULATOR_IPUS="3")
    *_, call, conclusion = done.stdout.splitlines()
    assert done.returncode == 1 and conclusion == "2 of 5 calls failed."  # gcipuinfo has failed before
    assert call.startswith("✗  IPUConfig.configure_ipu_system()")
    assert "InvalidArgumentError: The emulated IPUs cannot be used: IPU_EMULATOR_IPUS='3' is not possible" in call
    assert call.endswith("(session.py: ipu_config.configure_ipu_system())")


@pytest.mark.slow
def test_instances_of_poprun_check_their_calls_together_and_the_first_one_shows_them(poprun, emulator_dir):
    code, out, _ = poprun(2, 4, "python3", "-m", "tf_ipu_dp.doctor", "--sdk=emulator")
    lines = out.splitlines()
    assert code == 0 and all(line.startswith("[1,0]<stdout>:") for line in lines), out
    assert any("popdist.isPopdistEnvSet(), init()          connected" in line for line in lines)
    assert any("ipu.distributed.allgather()                2 instances" in line for line in lines)
    assert lines[-1].endswith("All 23 calls were accepted.")


@pytest.mark.slow
def test_programs_are_compiled_for_more_ipus_than_there_are_with_input_made_on_the_device(doctor, emulator_dir):
    words = ("--model=mlp", "--dataset=synthetic_device", "--ipus=8")
    done = doctor("--sdk=emulator", "--", *words, IPU_EMULATOR_IPUS="4")
    assert done.returncode == 0 and done.stdout.splitlines()[-1].endswith("calls were accepted."), done.stdout
    for name in ("evaluator.compile()", "evaluator.set_infeed_queue_options()", "tf.train.Checkpoint.read()"):
        assert f"✓  {name}" in done.stdout
    assert "✓  IPUConfig.configure_ipu_system()           8 IPUs, compile only for ipu2" in done.stdout


def test_without_the_poplar_sdk_its_check_is_one_sentence(doctor):
    done = doctor("--sdk=poplar")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        "doctor: --sdk=poplar cannot be used: the Poplar SDK is not enabled here (no module gcipuinfo). "
        "Source the Poplar SDK's enable script, or use --sdk=emulator.\n"
    )


def test_flags_of_train_are_for_the_check_of_an_sdk(doctor):
    done = doctor("--", "--ipus=4")
    assert done.returncode == 1
    assert done.stderr == ("doctor: --ipus=4 after -- is for a check of the SDK. Add --sdk=poplar or --sdk=emulator.\n")


def test_help_and_mistakes_are_like_those_of_train(doctor):
    assert "--[no]json" in doctor("--help").stdout
    done = doctor("--jsn")
    assert done.returncode == 1 and done.stderr == "doctor: --jsn is not a flag. Did you mean --json?\n"
