"""Makes every call into the SDK that a run makes, without training: programs are compiled and not executed.

A process of its own, which `doctor` starts: `python -m tf_ipu_dp.training.sdk_check SDK [flags of train]`. The calls
are those of the session, made by its own functions.
"""

from __future__ import annotations

import dataclasses
import os
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any, Callable, Optional, Sequence

from tf_ipu_dp import cli, sdk
from tf_ipu_dp.config import train_flags
from tf_ipu_dp.config.train_flags import TrainConfig
from tf_ipu_dp.datasets import facts, sources
from tf_ipu_dp.distributed import world
from tf_ipu_dp.planning import plan
from tf_ipu_dp.planning.plan import RunPlan
from tf_ipu_dp.sdk_calls import Call, Reporter

_MEASURED_ELEMENTS = 8
_ARCHITECTURE = "ipu2"  # if the devices do not report theirs


class _FailedError(Exception):
    """A call that the following ones need has failed."""


def main(words: Sequence[str]) -> int:
    """Checks one layout and reports to stdout. Returns the exit code, which is 0 even if calls have failed."""
    reporter = Reporter(sys.stdout)
    choice, *flags = words
    try:
        cfg = dataclasses.replace(train_flags.parse(flags), sdk=choice, evaluate=False, input_only=False)
        launched = world.read_launched(os.environ)
        run = plan.plan_run(cfg, facts.find(cfg), launched)
        if run.topology.instances > 1 and not launched:
            raise cli.UsageError(f"{cli.count(run.topology.instances, 'instance')} are started by poprun only.")
        with tempfile.TemporaryDirectory(prefix="doctor-") as folder:
            # Programs that are only compiled must be put into a cache.
            sdk.set_poplar_flags(os.environ, f"--executable_cache_path={folder}/executables")
            if run.dataset.made_on_device:
                sdk.set_poplar_flags(os.environ, *sdk.SYNTHETIC_INPUT)
            modules = sdk.load(choice, needs_ipus=False)
            check = _Check(cfg, run, modules, launched.instance if launched else 0, reporter, Path(folder))
            check.run_all()
    except (cli.UsageError, sdk.SdkError) as error:
        reporter.refuse(str(error))
        return 1
    return 0


class _Check:
    """The calls of one run, in the order in which a run makes them."""

    def __init__(
        self, cfg: TrainConfig, run: RunPlan, modules: sdk.Sdk, instance: int, reporter: Reporter, folder: Path
    ) -> None:
        self._cfg, self._run, self._sdk, self._instance = cfg, run, modules, instance
        self._reporter, self._folder = reporter, folder

    def run_all(self) -> None:
        """Makes all calls, or those before the first one that the rest needs."""
        try:
            session = self._make_session()
        except _FailedError:
            return
        keras, topology = self._run.keras, self._run.topology
        steps = keras.steps_per_execution * topology.local_replicas
        updates = self._run.epochs.device_iterations
        self._call(
            "model.fit()",
            lambda: session.model.fit(session.make_training(0, updates), epochs=1, steps_per_epoch=steps, verbose=0),
            lambda _: f"compiled {cli.count(updates, 'update')} on {cli.count(topology.local_replicas, 'replica')}",
        )
        self._call("model.predict()", session.evaluate, lambda scores: f"compiled, {scores.samples:,} samples")
        checkpoint = str(self._folder / "checkpoint")
        written = self._call("tf.train.Checkpoint.write()", lambda: session.state.write(checkpoint), lambda _: "")
        if written is not None:
            self._call(
                "tf.train.Checkpoint.read()",
                lambda: session.state.read(checkpoint).assert_existing_objects_matched(),
                lambda _: "",
            )
        self._call(
            "ipu.dataset_benchmark.dataset_benchmark()",
            lambda: sources.measure(
                session.make_training(0, updates),
                self._sdk.ipu,
                elements=_MEASURED_ELEMENTS,
                samples_per_element=self._run.batch.micro_batch_size,
            ),
        )
        weights = self._call("model.get_weights()", session.model.get_weights, lambda found: f"{len(found)} variables")
        if weights is not None and not self._instance:
            self._export(weights)

    def _make_session(self) -> Any:
        from tf_ipu_dp.training import checks, session

        cfg, run, modules = self._cfg, self._run, self._sdk
        architecture = self._read_devices()
        session.prepare_host(cfg)
        config = self._need("ipu.config.IPUConfig()", lambda: session.make_ipu_config(cfg, run, modules))
        distributed = self._need(
            "popdist.isPopdistEnvSet(), init()",
            lambda: session.connect_instances(modules),
            lambda found: "connected" if found else "not under poprun",
        )
        name = "popdist.tensorflow.set_ipu_config()" if distributed else "IPUConfig.auto_select_ipus"
        self._need(name, lambda: session.select_ipus(config, run, modules, distributed=distributed))
        config.device_connection.type = modules.ipu.config.DeviceConnectionType.PRE_COMPILE
        config.device_connection.version = architecture
        self._need(
            "IPUConfig.configure_ipu_system()",
            lambda: session.configure(config, run, modules),
            lambda _: f"{cli.count(run.topology.ipus_per_instance, 'IPU')}, compile only for {architecture}",
        )
        self._call("ipu.utils.reset_ipu_seed()", lambda: modules.ipu.utils.reset_ipu_seed(cfg.seed))
        device = self._need(
            "PopDistStrategy()" if distributed else "IPUStrategy()",
            lambda: session.make_device(run, modules, self._instance, distributed=distributed),
        )
        source = session.open_source(cfg, run)
        if run.topology.instances > 1:
            self._need(
                "ipu.distributed.allgather()",
                lambda: checks.compare_instances(cfg, run, modules, source, device.world),
                lambda _: f"{run.topology.instances} instances",
            )
        return session.make_session(cfg, run, modules, device, source, self._need)

    def _read_devices(self) -> str:
        """Returns the architecture that programs are compiled for."""
        devices = self._call(
            "gcipuinfo.gcipuinfo().getDevices()",
            lambda: list(self._sdk.gcipuinfo.gcipuinfo().getDevices()),
            lambda found: cli.count(len(found), "IPU"),
        )
        return (devices[0].get("ipu architecture") if devices else None) or _ARCHITECTURE

    def _export(self, weights: Sequence[Any]) -> None:
        from tf_ipu_dp.training import export

        path = str(self._folder / "export")
        self._call(
            "model.export_for_ipu_serving()",
            lambda: export.export_for_ipus(self._cfg, self._run, self._sdk, weights, path),
        )

    def _need(self, name: str, call: Callable[[], Any], describe: Optional[Callable[[Any], str]] = None) -> Any:
        """Makes a call that the following ones need."""
        done, result = self._make(name, call, describe)
        if not done:
            raise _FailedError(name)
        return result

    def _call(self, name: str, call: Callable[[], Any], describe: Optional[Callable[[Any], str]] = None) -> Any:
        """Makes a call that the following ones do not need; None if it fails."""
        return self._make(name, call, describe)[1]

    def _make(self, name: str, call: Callable[[], Any], describe: Optional[Callable[[Any], str]]) -> Any:
        self._reporter.begin(name)
        began = time.perf_counter()
        try:
            result = call()
            answer = describe(result) if describe else ""
        except Exception as error:  # noqa: BLE001 whatever the SDK raises is the answer
            self._reporter.end(Call(name, False, _explain(error)))
            return False, None
        seconds = time.perf_counter() - began
        took = [f"{seconds:.0f} s"] if seconds >= 1 else []
        self._reporter.end(Call(name, True, ", ".join([*filter(None, [answer]), *took])))
        return True, result


def _explain(error: BaseException) -> str:
    """Returns the SDK's words, and the line of this room that made the call."""
    cause = error.__cause__ if isinstance(error, cli.UsageError) and error.__cause__ else error
    words = cli.first_line(str(getattr(cause, "message", cause))) or "no reason given"
    folder = str(Path(__file__).parent)
    frames = traceback.extract_tb(cause.__traceback__)
    ours = [frame for frame in frames if frame.filename.startswith(folder) and frame.filename != __file__]
    where = f" ({Path(ours[-1].filename).name}: {ours[-1].line})" if ours else ""
    return f"{type(cause).__name__}: {words}{where}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
