"""A training session: a model on its device with its data and optimizer; evaluates and restores it.

Uses only the SDK's API, so that it runs on the Poplar SDK and on the emulator. Steps and files of the run are the
caller's.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import os
import random
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple, Type

import numpy as np
import tensorflow as tf

from tf_ipu_dp import cli
from tf_ipu_dp.config.train_flags import TrainConfig
from tf_ipu_dp.datasets import sources
from tf_ipu_dp.datasets.info import OWN
from tf_ipu_dp.distributed.world import World
from tf_ipu_dp.planning import architectures
from tf_ipu_dp.planning.plan import ModelPlan, RunPlan
from tf_ipu_dp.runs import checkpoints, records, saved_flags
from tf_ipu_dp.sdk import AttachError, BusyIpusError, Sdk, TooFewIpusError
from tf_ipu_dp.sdk_types import IpuConfig, IpuModel, Strategy
from tf_ipu_dp.training import fine_tuning, models, optimizers, own_models, preflight
from tf_ipu_dp.training.own_models import OwnTask
from tf_ipu_dp.training.task_scores import TaskScorer

_POLICIES = {"32.32": "float32", "16.32": "mixed_float16", "16.16": "float16"}
_PREFETCH_DEPTH = 3
_EXAMPLES = 8  # images for TensorBoard
# Makes a call into the SDK, which has a name. Who wants to know what the SDK answers passes another than `_call`.
CallSdk = Callable[[str, Callable[[], Any]], Any]


@dataclasses.dataclass(frozen=True)
class Device:
    """The attached IPUs of this instance, and its place among the instances."""

    strategy: Strategy
    distributed: bool  # the strategy is PopDist's, which divides losses by all replicas
    world: World


@dataclasses.dataclass(frozen=True)
class TrainingSession:
    """A model on its device, with its data, learning rate schedule and saved state."""

    cfg: TrainConfig
    plan: RunPlan
    source: sources.Source
    world: World
    model: IpuModel
    evaluator: IpuModel  # the same layers, with executions of the validation's length
    schedule: optimizers.Schedule
    state: Any  # all that changes: weights, optimizer, loss scale
    own: Optional[OwnTask] = None  # the user's model with its loss and metrics; None: a built-in model
    loaded: Optional[fine_tuning.Loaded] = None  # the weights of --init_from
    scorer: Optional[TaskScorer] = None  # of a task that is not a plain classification
    metric_names: Tuple[str, ...] = ()  # in the logs of `fit`, besides loss and accuracy

    def variables(self) -> Tuple[Tuple[str, Tuple[int, ...], str], ...]:
        """Returns the names, shapes and types of the weights."""
        return tuple((v.name, tuple(v.shape), v.dtype.name) for v in self.model.weights)

    @property
    def score_names(self) -> Tuple[str, ...]:
        """What a validation counts, by the names that --keep_best takes."""
        return ("loss", *(self.metric_names if self.scorer else ("accuracy", "top5")))

    def learning_rate(self, update: int) -> float:
        """Returns the learning rate of an update, counted from 0."""
        return float(self.schedule(tf.constant(np.asarray(update))))  # TensorFlow would keep every Python number

    def make_training(self, first_update: int, last_update: int) -> Any:
        """Returns this instance's share of the samples of some updates, as a dataset for `fit`."""
        return sources.make_training(
            self.source,
            self.plan,
            instance=self.world.instance,
            first_update=first_update,
            last_update=last_update,
            seed=self.cfg.seed,
            augment=self.plan.augment,
            eight_bit_io=self.cfg.eight_bit_io,
            prefetch=self.cfg.prefetch,
            deterministic=self.cfg.deterministic,
            dtype=input_dtype(self.plan.recipe.precision),
        )

    def example_images(self) -> Optional[Tuple[Any, List[str]]]:
        """Returns some training images as the model sees them, augmented, as 8-bit numbers, with their classes.

        None if the samples are not images that can be shown.
        """
        facts = self.plan.dataset
        if not facts.mean or facts.channels not in (1, 3, 4) or facts.made_on_device:
            return None
        images, labels, *_ = next(iter(self.make_training(0, self.plan.epochs.device_iterations)))
        pixels: Any = np.asarray(images[:_EXAMPLES], np.float32)
        if not self.cfg.eight_bit_io:
            pixels = 255 * (pixels * np.asarray(facts.deviation) + np.asarray(facts.mean))
        known = facts.class_names
        names = [known[label] if label < len(known) else str(label) for label in labels[:_EXAMPLES].numpy().tolist()]
        return np.clip(np.rint(pixels), 0, 255).astype(np.uint8), names

    def evaluate(self, progress: Callable[[], None] = lambda: None) -> records.Scores:
        """Returns the scores over every validation sample, each counted once, on any number of replicas.

        `progress` is called after every execution.
        """
        run, instance = self.plan, self.world.instance
        after = tf.keras.callbacks.LambdaCallback()
        after.on_predict_batch_end = lambda batch, logs=None: progress()
        dataset = self._validation
        outputs = self.evaluator.predict(dataset, steps=run.keras.validation_steps, verbose=0, callbacks=[after])
        labels = sources.targets_of_validation(self.source, run, instance)
        weights = sources.weights_of_validation(self.source, run, instance)
        if self.scorer:
            return self.scorer.score(outputs, labels, self.world, weights, self._masks(dataset, labels))
        logits: Any = np.asarray(outputs, np.float64)
        if self.own and self.own.gives_probabilities:
            logits = np.log(np.maximum(logits, optimizers.LEAST_PROBABILITY))
        # An instance without validation samples has no means.
        local = score(logits[: len(labels)], labels, weights) if len(labels) else records.Scores(0, 0.0, 0.0, 0.0)
        loss = math.nan if local.loss is None else local.loss
        shares = (local.top1 or 0.0, local.top5 or 0.0)
        count, *totals = self.world.sum_over_instances(
            [local.samples, *(local.samples * each for each in (loss, *shares))]
        )
        loss, top1, top5 = (total / count for total in totals)
        return records.Scores(int(count), records.finite(loss), top1, top5)

    @functools.cached_property
    def _validation(self) -> Any:
        """This instance's part of the validation samples, as a dataset for `predict`."""
        return sources.make_validation(
            self.source,
            self.plan,
            instance=self.world.instance,
            eight_bit_io=self.cfg.eight_bit_io,
            prefetch=self.cfg.prefetch,
            dtype=input_dtype(self.plan.recipe.precision),
        )

    def _masks(self, dataset: Any, targets: Any) -> Optional[List[Any]]:
        """Returns the masks that layers leave on the outputs for the validation samples; None if there are none.

        The inputs alone decide them, so they are computed once, on the host.
        """
        assert self.own and self.scorer
        if not self.own.has_masks:
            return None
        if self.scorer.masks is None:
            model: Any = self.model
            find = tf.function(lambda inputs: own_models.masks_of(model(inputs, training=False)))
            with tf.device("CPU:0"):
                found = [find(batch[0]) for batch in dataset]
            count = len(tf.nest.flatten(targets)[0])
            self.scorer.masks = [
                np.concatenate([np.asarray(each) for each in parts])[:count] if parts[0] is not None else None
                for parts in zip(*found)
            ]
        return self.scorer.masks

    def restore(self, found: checkpoints.Checkpoint, *, whole: bool) -> None:
        """Reads a checkpoint that fits: all of it, or the weights alone."""
        state = self.state if whole else tf.train.Checkpoint(model=self.model)
        status = state.read(str(found.prefix))
        status.assert_existing_objects_matched()
        if not whole or found.manifest.step >= self.plan.epochs.updates:
            status.expect_partial()  # without further steps the optimizer's state stays unused


def attach(cfg: TrainConfig, run: RunPlan, sdk: Sdk, instance: int) -> Device:
    """Connects to the other instances and attaches the IPUs.

    Must be called before anything is computed, because it also sets seeds and TensorFlow's threads.
    """
    prepare_host(cfg)
    ipu_config = make_ipu_config(cfg, run, sdk)
    distributed = connect_instances(sdk)
    select_ipus(ipu_config, run, sdk, distributed=distributed)
    configure(ipu_config, run, sdk)
    sdk.ipu.utils.reset_ipu_seed(cfg.seed)
    return make_device(run, sdk, instance, distributed=distributed)


def make_ipu_config(cfg: TrainConfig, run: RunPlan, sdk: Sdk) -> IpuConfig:
    """Returns the configuration of the run's IPUs, without saying which they are."""
    ipu_config = sdk.ipu.config.IPUConfig()
    ipu_config.allow_recompute = cfg.recompute
    if cfg.deterministic or run.topology.instances > 1:
        # The seed is the same on all instances, and workers must make the same random numbers of it everywhere.
        ipu_config.compilation_poplar_options = {"target.deterministicWorkers": "portable"}
    # Otherwise IPUs limit 16-bit numbers to the largest one, which hides overflows from the loss scale and from us.
    ipu_config.floating_point_behaviour.nanoo = run.recipe.precision != "32.32"
    if run.recipe.precision == "16.16" and not cfg.deterministic:
        # Without it, updates below half the spacing of 16-bit weights are lost.
        ipu_config.floating_point_behaviour.esr = sdk.ipu.config.StochasticRoundingBehaviour.ON
        # Otherwise replicas round the same weights differently, and drift apart.
        ipu_config.experimental.enable_prng_stability = True
    return ipu_config


def connect_instances(sdk: Sdk) -> bool:
    """Connects to the other instances if poprun has started this one; returns whether it has."""
    if not sdk.popdist.isPopdistEnvSet():
        return False
    try:
        sdk.popdist.init()
    except RuntimeError as error:  # the other instances cannot be reached; its text has the reason
        raise cli.UsageError(cli.first_line(str(error))) from error
    return True


def select_ipus(ipu_config: IpuConfig, run: RunPlan, sdk: Sdk, *, distributed: bool) -> None:
    """Sets which IPUs this instance uses."""
    if distributed:
        sdk.set_popdist_config(ipu_config, ipus_per_replica=run.topology.ipus_per_replica)
    else:
        ipu_config.auto_select_ipus = run.topology.ipus_per_instance


def configure(ipu_config: IpuConfig, run: RunPlan, sdk: Sdk) -> None:
    """Attaches the IPUs; `cli.UsageError` if that is not possible."""
    try:
        ipu_config.configure_ipu_system()
    except tf.errors.OpError as error:
        kind: Type[AttachError] = BusyIpusError
        if isinstance(error, tf.errors.InvalidArgumentError):
            kind = AttachError  # of the configuration
        elif isinstance(error, tf.errors.FailedPreconditionError):
            kind = TooFewIpusError
        raise preflight.refuse_ipus(run.topology, kind(error.message), sdk.name) from error


def make_device(run: RunPlan, sdk: Sdk, instance: int, *, distributed: bool) -> Device:
    """Returns the configured IPUs with their strategy, and this instance's place among the others."""
    collectives = sdk.host_collectives() if run.topology.instances > 1 else None
    world = World(instance, run.topology.instances, collectives)
    return Device(sdk.make_strategy(distributed=distributed), distributed, world)


def open_source(cfg: TrainConfig, run: RunPlan) -> sources.Source:
    """Opens the data set; `cli.UsageError` if it cannot be read."""
    try:
        if run.dataset.origin == OWN:
            return sources.open_own(run.dataset, cfg)
        return sources.open_source(run.dataset, data_dir=cfg.data_dir, seed=cfg.seed)
    except tf.errors.OpError as error:
        raise cli.UsageError(
            f"--dataset={cfg.dataset} cannot be read ({type(error).__name__}: {cli.first_line(error.message)}). "
            "Remove its folder and prepare it again."
        ) from error


def _call(name: str, call: Callable[[], Any]) -> Any:
    del name
    return call()


def make_session(
    cfg: TrainConfig, run: RunPlan, sdk: Sdk, device: Device, source: sources.Source, call: CallSdk = _call
) -> TrainingSession:
    """Makes the model, its optimizer and its options on the device."""
    strategy = device.strategy
    recipe, batch, topology = run.recipe, run.batch, run.topology
    scale, method = optimizers.gradient_scale(
        recipe.reduction,
        replicas=topology.replicas,
        local_replicas=topology.local_replicas,
        distributed=device.distributed,
    )
    with strategy.scope():
        own = call("tf.keras.Model()", lambda: make_own(cfg, run)) if cfg.has_own_model else None
        model = own.model if own else call("tf.keras.Model()", lambda: _make_model(cfg, run))
        if cfg.freeze:
            fine_tuning.freeze(model, cfg.freeze)
        if own:
            run = _plan_as_built(cfg, run, own)
        starts = not (cfg.evaluate or cfg.input_only or saved_flags.is_resumed(cfg))
        loaded = fine_tuning.load(model, cfg.init_from) if cfg.init_from and starts else None
        evaluator = tf.keras.Model(model.input if own else model.inputs, model.outputs)
        optimizer = optimizers.make_optimizer(recipe, gradient_scale=scale)
        call(
            "model.compile()",
            lambda: model.compile(
                optimizer=optimizer,
                steps_per_execution=run.keras.steps_per_execution,
                **_losses(recipe.label_smoothing, own),
            ),
        )
        validation_steps = run.keras.validation_steps_per_execution
        call("evaluator.compile()", lambda: evaluator.compile(steps_per_execution=validation_steps))
        # Not on the evaluator: without a pipeline the SDK reduces the outputs of predict over the replicas too.
        call(
            "model.set_replication_options()",
            lambda: model.set_replication_options(replicated_metric_reduction_method="MEAN"),
        )
        _set_options(model, cfg, run, sdk, batch.accumulation, method, call)
        _set_options(evaluator, cfg, run, sdk, topology.pipeline_stages, method, call, "evaluator")
    scorer = TaskScorer(model, own.task, cfg.model) if own and not own.is_classification else None
    return TrainingSession(
        cfg=cfg,
        plan=run,
        source=source,
        world=device.world,
        model=model,
        evaluator=evaluator,
        schedule=optimizers.Schedule(recipe),
        state=tf.train.Checkpoint(model=model, optimizer=model.optimizer),
        own=own,
        loaded=loaded,
        scorer=scorer,
        metric_names=scorer.try_out(run.dataset.targets, weighted=run.dataset.weighted) if scorer else (),
    )


def make_serving_model(cfg: TrainConfig, run: RunPlan, sdk: Sdk, weights: Sequence[Any]) -> IpuModel:
    """Returns a model of one replica with these weights, for the export. It ends the use of the attached IPUs.

    An exported program takes the input of all replicas that are configured when it is compiled. Nothing is attached for
    it, and no other instance takes part.
    """
    ipu_config = sdk.ipu.config.IPUConfig()
    ipu_config.auto_select_ipus = run.topology.ipus_per_replica
    ipu_config.device_connection.type = sdk.ipu.config.DeviceConnectionType.ON_DEMAND
    ipu_config.configure_ipu_system()
    stages = run.topology.pipeline_stages
    with sdk.make_strategy(distributed=False).scope():
        model = make_own(cfg, run).model if cfg.has_own_model else _make_model(cfg, run)
        model.set_weights(weights)
        model.compile(steps_per_execution=stages)
        _set_options(model, cfg, run, sdk, stages, "mean")
    return model


def score(logits: Any, labels: Any, weights: Optional[Any] = None) -> records.Scores:
    """Returns cross-entropy and accuracies of some predictions. Of equal logits the first ranks higher.

    Weights of the samples count in the cross-entropy alone, as in Keras.
    """
    rows = np.arange(len(labels))
    highest = logits.max(axis=1, keepdims=True)
    label_logits = logits[rows, labels]
    losses = np.log(np.exp(logits - highest).sum(axis=1)) + highest[:, 0] - label_logits
    if weights is not None:
        losses *= weights
    columns = np.arange(logits.shape[1])
    above = logits > label_logits[:, None]
    equal_before = (logits == label_logits[:, None]) & (columns < labels[:, None])
    rank = (above | equal_before).sum(axis=1)
    # NaN compares as false, so a sample whose label has no finite logit must be excluded.
    is_valid = np.isfinite(label_logits)
    count = len(labels)
    top1, top5 = (float((is_valid & (rank < k)).sum() / count) for k in (1, 5))
    return records.Scores(samples=count, loss=records.finite(losses.mean()), top1=top1, top5=top5)


def make_own(cfg: TrainConfig, run: RunPlan) -> OwnTask:
    """Returns the user's own model with its task, in the precision of the run."""
    tf.keras.mixed_precision.set_global_policy(_POLICIES[run.recipe.precision])
    try:
        return own_models.build(cfg.model, run.dataset, run.model.architecture.norm)
    finally:
        tf.keras.mixed_precision.set_global_policy("float32")


def _plan_as_built(cfg: TrainConfig, run: RunPlan, own: OwnTask) -> RunPlan:
    """Returns the plan with the model as it really is: what was learned before may be of code that has changed."""
    architecture = own_models.describe(own, cfg.model, run.dataset, run.model.architecture.norm)
    if architecture == run.model.architecture:
        return run
    stages = run.topology.pipeline_stages
    try:
        splits = cfg.pipeline_splits or architectures.balance(architecture, stages)
        model = ModelPlan(architecture, architectures.cut(architecture, splits))
    except ValueError as error:
        raise cli.UsageError(f"--model={cfg.model} cannot be cut into {stages} pipeline stages: {error}") from error
    return dataclasses.replace(run, model=model, dataset=dataclasses.replace(run.dataset, own_model=architecture))


def _losses(label_smoothing: float, own: Optional[OwnTask]) -> Dict[str, Any]:
    """Returns what Keras compiles a model with: the loss and metrics of the task, or those of a classification."""
    if own and not own.is_classification:
        task = own.task
        names = ("loss", "metrics", "loss_weights", "weighted_metrics")
        return {name: getattr(task, name) for name in names}
    probabilities = own is not None and own.gives_probabilities
    return {
        "loss": optimizers.Crossentropy(label_smoothing=label_smoothing, probabilities=probabilities),
        "metrics": [tf.keras.metrics.SparseCategoricalAccuracy(name="accuracy")],
    }


def _make_model(cfg: TrainConfig, run: RunPlan) -> IpuModel:
    # Only the model uses the policy: metrics made under it would count in 16 bits.
    tf.keras.mixed_precision.set_global_policy(_POLICIES[run.recipe.precision])
    model: IpuModel = models.make_model(
        run.model.architecture,
        eight_bit_input=cfg.eight_bit_io,
        mean=run.dataset.mean,
        deviation=run.dataset.deviation,
    )
    tf.keras.mixed_precision.set_global_policy("float32")
    return model


def _set_options(
    model: IpuModel,
    cfg: TrainConfig,
    run: RunPlan,
    sdk: Sdk,
    accumulation: int,
    method: str,
    call: CallSdk = _call,
    name: str = "model",
) -> None:
    topology = run.topology
    depth = _PREFETCH_DEPTH if cfg.prefetch else 1
    call(f"{name}.set_infeed_queue_options()", lambda: model.set_infeed_queue_options(prefetch_depth=depth))
    if topology.pipeline_stages == 1:
        call(
            f"{name}.set_gradient_accumulation_options()",
            lambda: model.set_gradient_accumulation_options(
                gradient_accumulation_steps_per_replica=accumulation, gradient_accumulation_reduction_method=method
            ),
        )
        return
    call(f"{name}.set_pipeline_stage_assignment()", lambda: models.assign_stages(model, run.model.stages))
    call(
        f"{name}.set_pipelining_options()",
        lambda: model.set_pipelining_options(
            gradient_accumulation_steps_per_replica=accumulation,
            gradient_accumulation_reduction_method=method,
            pipeline_schedule=sdk.ipu.ops.pipelining_ops.PipelineSchedule[topology.pipeline_schedule.capitalize()],
        ),
    )


def prepare_host(cfg: TrainConfig) -> None:
    """Sets the seeds, and TensorFlow's threads and determinism."""
    # Silences Keras's warnings about callbacks that save and models without metrics.
    tf.get_logger().setLevel("ERROR")
    random.seed(cfg.seed)
    np.random.seed(cfg.seed % 2**32)
    tf.random.set_seed(cfg.seed)
    seed_keras = getattr(tf.keras.utils, "set_random_seed", None)  # initial weights, from TensorFlow 2.7 on
    if seed_keras is not None:
        seed_keras(cfg.seed % 2**32)
    if cfg.deterministic or cfg.evaluate:
        # Kernels on the host split sums by thread, so the same bits need the same number of threads.
        with contextlib.suppress(RuntimeError):  # TensorFlow is already initialised, in a test or a notebook
            tf.config.threading.set_intra_op_parallelism_threads(_threads())
    if cfg.deterministic:
        os.environ["TF_DETERMINISTIC_OPS"] = "1"
        enable = getattr(tf.config.experimental, "enable_op_determinism", None)
        if enable is not None:
            enable()


def _threads() -> int:
    """Returns the launcher's threads for this instance; else half the cores, for two concurrent micro batches."""
    given = os.environ.get("TF_NUM_INTRAOP_THREADS", "")
    if given.isdigit() and int(given):
        return int(given)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(cores // 2, 1)


def input_dtype(precision: str) -> str:
    """Returns the type of floating-point inputs in a precision."""
    return "float32" if precision == "32.32" else "float16"


def make_plain_model(cfg: TrainConfig, run: RunPlan) -> IpuModel:
    """Returns the model of a run as Keras makes it, on no device."""
    return _make_model(cfg, run)


def configure_replicas(sdk: Sdk, replicas: int) -> None:
    """Attaches one IPU for each of some replicas, for a model that is not planned; UsageError if that is impossible."""
    ipu_config = sdk.ipu.config.IPUConfig()
    ipu_config.auto_select_ipus = replicas
    try:
        ipu_config.configure_ipu_system()
    except tf.errors.OpError as error:
        raise cli.UsageError(f"--ipus={replicas} cannot be attached: {cli.first_line(error.message)}") from error
