"""Programs written for the Poplar SDK, run as scripts on the emulator."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap

import pytest


@pytest.fixture(autouse=True)
def _fresh_pythons(monkeypatch):
    """How the command starts is what is tested here."""
    monkeypatch.setenv("IPU_EMULATOR_PRELOAD", "0")


@pytest.fixture
def run(tmp_path, emulator_dir, run_command):
    """Runs the text of a program on the emulator and returns the completed process."""

    def run_text(source, *words, **environ):
        program = tmp_path / "program.py"
        program.write_text(textwrap.dedent(source), encoding="utf-8")
        return run_command("emulator", program, *words, cwd=tmp_path, **environ)

    return run_text


def test_a_program_has_its_arguments_path_name_and_exit_code(run, tmp_path):
    (tmp_path / "beside.py").write_text("value = 5\n", encoding="utf-8")
    done = run(
        """
        import sys, beside
        assert __name__ == "__main__" and sys.modules["__main__"].sys is sys
        print(sys.argv[1:], beside.value, __file__ == sys.argv[0])
        sys.exit(7)
        """,
        "a", "--b=c",
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (7, "['a', '--b=c'] 5 True\n")


def test_a_module_can_be_run_too(tmp_path, run_command):
    (tmp_path / "tool.py").write_text("import sys, popdist; print(__name__, sys.argv[1:])\n", encoding="utf-8")
    done = run_command("emulator", "-m", "tool", "x", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "__main__ ['x']\n")


def test_a_program_that_is_not_there_is_one_sentence(tmp_path, run_command):
    done = run_command("emulator", "nowhere.py", cwd=tmp_path)
    assert done.returncode == 1 and done.stderr.startswith("emulator: there is no program 'nowhere.py'.")
    (tmp_path / "folder").mkdir()
    done = run_command("emulator", "folder", cwd=tmp_path)
    assert done.returncode == 1 and done.stderr.startswith("emulator: 'folder' is a folder without a __main__.py, and")


@pytest.mark.parametrize(
    ("module", "missing"), [("nowhere", "nowhere"), ("nowhere.tool", "nowhere"), ("package", "package.__main__")]
)
def test_a_module_that_is_not_there_is_one_sentence(tmp_path, run_command, module, missing):
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").touch()
    done = run_command("emulator", "-m", module, cwd=tmp_path)
    assert done.returncode == 1 and done.stderr.startswith(f"emulator: there is no module {missing!r} to run. usage: ")
    assert done.stderr.count("\n") == 1


def test_a_monitor_sees_its_own_attachment_without_hardware_values(run):
    done = run(
        """
        import json, os
        from tensorflow.python import ipu
        import gcipuinfo

        cfg = ipu.config.IPUConfig()
        cfg.auto_select_ipus = 2
        cfg.configure_ipu_system()
        inventory = gcipuinfo.gcipuinfo()
        mine = [d for d in inventory.getDevices() if d.get("user process id") == str(os.getpid())]
        print(json.dumps(mine))
        print(len(inventory.getNamedAttributeForAll(gcipuinfo.IpuPower)), inventory.checkHealthOfDevices())
        print(inventory.getNamedAttributeForDevice(3, "board type"))
        """,
        IPU_EMULATOR_IPUS="8",
    )
    assert done.returncode == 0, done.stderr
    first, second, third = done.stdout.splitlines()
    mine = json.loads(first)
    assert [device["id"] for device in mine] == ["0", "1"]
    assert mine[0]["user executable"] == "program.py" and mine[0]["clock"] == "1330MHz"
    assert mine[0]["ipu power"] == mine[0]["average die temp"] == "N/A"
    assert (second, third) == ("8 {}", "M2000")


POPRUN = {
    "POPDIST_NUM_TOTAL_REPLICAS": "4",
    "POPDIST_NUM_LOCAL_REPLICAS": "4",
    "POPDIST_NUM_IPUS_PER_REPLICA": "2",
    "POPDIST_REPLICA_INDEX_OFFSET": "0",
}
DISTRIBUTED = """
    import popdist, popdist.tensorflow
    from tensorflow.python import ipu

    if popdist.isPopdistEnvSet():
        popdist.init()
    cfg = ipu.config.IPUConfig()
    assert popdist.tensorflow.set_ipu_config(cfg, ipus_per_replica=popdist.getNumIpusPerReplica()) is cfg
    cfg.configure_ipu_system()
    print(popdist.getNumTotalReplicas(), popdist.getNumInstances(), popdist.getInstanceIndex(), cfg.select_ipus)
"""


def test_popdist_without_poprun_is_one_replica(run):
    assert run(DISTRIBUTED).stdout == "1 1 0 [0]\n"


def test_popdist_for_one_instance_takes_the_device_for_its_replicas(run):
    done = run(DISTRIBUTED, IPU_EMULATOR_IPUS="16", **POPRUN)
    assert done.stdout == "4 1 0 [28]\n", done.stderr


def test_it_is_not_active_unless_asked_for_and_refuses_beside_the_real_sdk():
    code = (
        "import importlib.util, sys, types\n"
        "import tf_ipu_dp.emulator as emulator\n"
        "assert importlib.util.find_spec('popdist') is None\n"
        "sys.modules['popdist'] = types.ModuleType('popdist')\n"
        "try:\n    emulator.install()\nexcept RuntimeError as error:\n    print(error)\n"
        "del sys.modules['popdist']\nemulator.install(); emulator.install()\n"
        "print(sum(type(f).__name__ == '_Finder' for f in sys.meta_path))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    refusal, count = done.stdout.splitlines()
    assert refusal.startswith("The emulator cannot be installed: the real popdist is imported already") and count == "1"


@pytest.mark.slow
def test_a_program_may_end_while_tensorflow_still_deletes_its_input(run):
    # The input has a long multiplication in flight when `fit` ends. TensorFlow cannot cancel it.
    done = run(
        """
        import tensorflow as tf
        from tensorflow.python import ipu

        config = ipu.config.IPUConfig()
        config.auto_select_ipus = 1
        config.configure_ipu_system()

        def prepare(number):
            row = tf.cond(number < 45, lambda: tf.zeros([4]), lambda: square(tf.random.normal([5000, 5000]))[0, :4])
            return row, tf.cast(number, tf.float32)

        def square(matrix):
            return tf.matmul(matrix, matrix)

        numbers = tf.data.Dataset.range(1000).map(prepare, num_parallel_calls=1)
        with ipu.ipu_strategy.IPUStrategy().scope():
            model = tf.keras.Sequential([tf.keras.layers.Dense(1)])
            model.compile("sgd", "mse", steps_per_execution=5)
            model.fit(numbers.batch(4, drop_remainder=True).prefetch(2), steps_per_epoch=10, verbose=0)
        print("trained")
        """
    )
    assert (done.returncode, done.stdout) == (0, "trained\n"), done.stderr[-2000:]
