"""A trainer for image classification as applications write it: replicas, accumulation, a pipeline, 16.16.

The optimizers are built as add-on packages build theirs: a mixin for decoupled weight decay that overrides `minimize`
and `apply_gradients`, a function that adds it to any optimizer, and LAMB.
"""

import random
import re
import tempfile
from pathlib import Path

import numpy as np
import tensorflow as tf
from tensorflow import keras
from tensorflow.python import ipu

CLASSES = 4
SAMPLES = 192
MICRO_BATCH = 4
RATE, MOMENTUM, DECAY = 0.05, 0.9, 0.001

rng = np.random.RandomState(11)
labels = np.arange(SAMPLES) % CLASSES
patterns = rng.randn(CLASSES, 8, 8, 3)
images = (patterns[labels] + 0.3 * rng.randn(SAMPLES, 8, 8, 3)).astype("float32")
one_hot = np.eye(CLASSES, dtype="float32")[labels]


class DecoupledWeightDecayExtension:
    """Decays weights apart from the gradient, in any optimizer that it is mixed into."""

    def __init__(self, weight_decay, **kwargs):
        super().__init__(**kwargs)
        self._decay_var_list = None
        self._set_hyper("weight_decay", weight_decay)

    def get_config(self):
        return {**super().get_config(), "weight_decay": self._serialize_hyperparameter("weight_decay")}

    def minimize(self, loss, var_list, grad_loss=None, name=None, decay_var_list=None, tape=None):
        self._decay_var_list = {v.ref() for v in decay_var_list} if decay_var_list else False
        return super().minimize(loss, var_list=var_list, grad_loss=grad_loss, name=name, tape=tape)

    def apply_gradients(self, grads_and_vars, name=None, decay_var_list=None, **kwargs):
        self._decay_var_list = {v.ref() for v in decay_var_list} if decay_var_list else False
        return super().apply_gradients(grads_and_vars, name=name, **kwargs)

    def _decay_weights_op(self, var, apply_state=None):
        if self._decay_var_list and var.ref() not in self._decay_var_list:
            return tf.no_op()
        key = (var.device, var.dtype.base_dtype)
        coefficients = (apply_state or {}).get(key) or self._fallback_apply_state(*key)
        return var.assign_sub(coefficients["wd_t"] * var, self._use_locking)

    def _prepare_local(self, var_device, var_dtype, apply_state):
        super()._prepare_local(var_device, var_dtype, apply_state)
        apply_state[(var_device, var_dtype)]["wd_t"] = tf.identity(self._get_hyper("weight_decay", var_dtype))

    def _resource_apply_dense(self, grad, var, apply_state=None):
        with tf.control_dependencies([self._decay_weights_op(var, apply_state=apply_state)]):
            return super()._resource_apply_dense(grad, var, apply_state=apply_state)


def extend_with_decoupled_weight_decay(base_optimizer):
    class OptimizerWithDecoupledWeightDecay(DecoupledWeightDecayExtension, base_optimizer):
        def __init__(self, weight_decay, *args, **kwargs):
            super().__init__(weight_decay, *args, **kwargs)

    return OptimizerWithDecoupledWeightDecay


class SGDW(DecoupledWeightDecayExtension, keras.optimizers.SGD):
    def __init__(self, weight_decay, learning_rate=0.001, momentum=0.0, nesterov=False, name="SGDW", **kwargs):
        super().__init__(
            weight_decay, learning_rate=learning_rate, momentum=momentum, nesterov=nesterov, name=name, **kwargs
        )


AdamW = extend_with_decoupled_weight_decay(keras.optimizers.Adam)


class LAMB(keras.optimizers.Optimizer):
    """Adam's direction with the length of the weights, without decay for biases and normalisation."""

    def __init__(self, learning_rate=0.001, weight_decay_rate=0.01, exclude="bias|beta|gamma", name="LAMB", **kwargs):
        super().__init__(name, **kwargs)
        self._set_hyper("learning_rate", learning_rate)
        self.weight_decay_rate, self.exclude = weight_decay_rate, exclude

    def _create_slots(self, var_list):
        for slot in ("m", "v"):
            for var in var_list:
                self.add_slot(var, slot)

    def _resource_apply_dense(self, grad, var, apply_state=None):
        key = (var.device, var.dtype.base_dtype)
        rate = ((apply_state or {}).get(key) or self._fallback_apply_state(*key))["lr_t"]
        step = tf.cast(self.iterations + 1, var.dtype)
        m, v = self.get_slot(var, "m"), self.get_slot(var, "v")
        m = m.assign(0.9 * m + 0.1 * grad)
        v = v.assign(0.999 * v + 0.001 * tf.square(grad))
        update = m / (1 - 0.9**step) / (tf.sqrt(v / (1 - 0.999**step)) + 1e-6)
        if not re.search(self.exclude, var.name):
            update += self.weight_decay_rate * var
        norms = tf.norm(var), tf.norm(update)
        ratio = tf.where(norms[0] > 0, tf.where(norms[1] > 0, norms[0] / norms[1], 1.0), 1.0)
        return var.assign_sub(ratio * rate * update)


class BatchNormalization(keras.layers.BatchNormalization):
    """Keeps its parameters in the type of the model."""

    @property
    def _param_dtype(self):
        return self.dtype


def make_model():
    inputs = keras.Input((8, 8, 3))
    x = keras.layers.Conv2D(8, 3, padding="same", use_bias=False, name="stem")(inputs)
    x = keras.layers.ReLU(name="stem_relu")(BatchNormalization(momentum=0.7, name="stem_norm")(x))
    shortcut = x
    x = keras.layers.Conv2D(8, 3, padding="same", use_bias=False, name="block_conv")(x)
    x = BatchNormalization(momentum=0.7, name="block_norm")(x)
    x = keras.layers.ReLU(name="block_relu")(keras.layers.Add(name="block_add")([x, shortcut]))
    x = keras.layers.GlobalAveragePooling2D(name="head_pool")(x)
    return keras.Model(inputs, keras.layers.Dense(CLASSES, name="head_logits")(x))


def assign_stages(model):
    stage_of = {"stem": 0, "block": 1, "head": 2}
    assignments = model.get_pipeline_stage_assignment()
    for assignment in assignments:
        assignment.pipeline_stage = stage_of[assignment.layer.name.split("_")[0]]
    model.set_pipeline_stage_assignment(assignments)


def make_dataset(dtype):
    data = tf.data.Dataset.from_tensor_slices((images, one_hot))
    data = data.map(lambda image, label: (tf.cast(image, dtype), tf.cast(label, dtype)))
    return data.batch(MICRO_BATCH, drop_remainder=True).repeat()


def train(optimizer, ipus, stages, accumulation, precision, epochs, start=None, loss_scaling=None, folder=None):
    compute, parameters = ("float16" if bits == "16" else "float32" for bits in precision.split("."))
    assert compute == parameters
    config = ipu.config.IPUConfig()
    config.auto_select_ipus = ipus
    config.convolutions.poplar_options = {"partialsType": "half" if parameters == "float16" else "float"}
    config.configure_ipu_system()
    replicas = ipus // (4 if stages == 3 else stages)
    keras.backend.set_floatx(parameters)
    keras.mixed_precision.set_global_policy(parameters)
    with ipu.ipu_strategy.IPUStrategy().scope():
        model = make_model()
        if start:
            model.set_weights(start)
        options = {
            "gradient_accumulation_steps_per_replica": accumulation,
            "gradient_accumulation_reduction_method": "running_mean",
        }
        if stages > 1:
            assign_stages(model)
            schedule = ipu.ops.pipelining_ops.PipelineSchedule.Grouped
            model.set_pipelining_options(pipeline_schedule=schedule, device_mapping=[0, 1, 2], **options)
        else:
            model.set_gradient_accumulation_options(**options)
        mean = [lambda pairs: [(gradient / replicas, variable) for gradient, variable in pairs]]
        optimizer = optimizer(gradient_transformers=mean)
        if loss_scaling:
            optimizer = keras.mixed_precision.LossScaleOptimizer(optimizer, dynamic=False, initial_scale=loss_scaling)
        model.compile(
            optimizer,
            keras.losses.CategoricalCrossentropy(from_logits=True, label_smoothing=0.1),
            metrics=["accuracy"],
            steps_per_execution=accumulation,
        )
        callbacks = [keras.callbacks.CSVLogger(str(Path(folder, "log.csv")))] if folder else []
        callbacks += [keras.callbacks.TensorBoard(folder, update_freq="batch", profile_batch=0)] if folder else []
        history = model.fit(
            make_dataset(compute), steps_per_epoch=SAMPLES // MICRO_BATCH, epochs=epochs, verbose=0, callbacks=callbacks
        ).history
        # Validation as a pipeline fills it: the same steps per execution.
        scores = model.evaluate(make_dataset(compute), steps=SAMPLES // MICRO_BATCH, verbose=0)
    keras.backend.set_floatx("float32")
    keras.mixed_precision.set_global_policy("float32")
    return model, history, scores


def trained_by_hand(start, micro_batches_per_update, epochs):
    """SGD with momentum and decoupled decay: batch norm sees single micro batches, an update the mean of several."""
    model = make_model()
    model.set_weights(start)
    loss_function = keras.losses.CategoricalCrossentropy(from_logits=True, label_smoothing=0.1)
    velocity = [np.zeros(variable.shape, "float32") for variable in model.trainable_variables]
    batches = iter(make_dataset("float32"))
    for _ in range(epochs * SAMPLES // MICRO_BATCH // micro_batches_per_update):
        total = [np.zeros_like(fast) for fast in velocity]
        for _ in range(micro_batches_per_update):
            x, y = next(batches)
            with tf.GradientTape() as tape:
                loss = loss_function(y, model(x, training=True))
            gradients = tape.gradient(loss, model.trainable_variables)
            total = [before + gradient.numpy() / micro_batches_per_update for before, gradient in zip(total, gradients)]
        velocity = [MOMENTUM * fast - RATE * gradient for fast, gradient in zip(velocity, total)]
        for variable, fast in zip(model.trainable_variables, velocity):
            variable.assign(variable * (1 - DECAY) + fast)
    return model


random.seed(12)  # of Keras's initializers
tf.random.set_seed(12)
start = make_model().get_weights()

# Two replicas with accumulation: an optimizer that inherits `minimize`, against the same rule by hand.
with tempfile.TemporaryDirectory() as folder:
    model, history, scores = train(
        lambda **kwargs: SGDW(DECAY, RATE, MOMENTUM, **kwargs), 2, 1, 4, "32.32", epochs=3, start=start, folder=folder
    )
    assert list(Path(folder, "train").glob("events*")) and Path(folder, "log.csv").read_text().count("\n") == 4
expected = trained_by_hand(start, 8, epochs=3).trainable_variables
for ours, theirs in zip(model.trainable_variables, expected):
    np.testing.assert_allclose(ours.numpy(), theirs.numpy(), atol=1e-4)
assert model.optimizer.iterations.numpy() == 18
print(f"SGDW: {model.optimizer.iterations.numpy()} updates, accuracy above 0.5: {scores[1] > 0.5}")

# LAMB without accumulation, on four replicas.
model, history, scores = train(lambda **kwargs: LAMB(0.03, **kwargs), 4, 1, 1, "32.32", epochs=3, start=start)
print(f"LAMB: {model.optimizer.iterations.numpy()} updates, accuracy above 0.8: {scores[1] > 0.8}")

# Three stages on four IPUs in half precision throughout, with a constant loss scale around the optimizer.
model, history, scores = train(
    lambda **kwargs: AdamW(DECAY, learning_rate=0.01, epsilon=1e-4, **kwargs),
    4, 3, 6, "16.16", epochs=4, start=start, loss_scaling=128,
)  # fmt: skip
assert {weight.dtype for weight in model.weights} == {tf.float16}
assert np.isfinite(history["loss"]).all() and np.isfinite(scores).all(), (history, scores)
updates = model.optimizer.inner_optimizer.iterations.numpy()
print(f"AdamW in 16.16 and 3 stages: {updates} updates, accuracy above 0.8: {scores[1] > 0.8}")


# An own `minimize` in the class itself is what the SDK refuses.
class OwnMinimize(keras.optimizers.SGD):
    def minimize(self, loss, var_list, grad_loss=None, name=None, tape=None):
        return super().minimize(loss, var_list, grad_loss, name, tape)


try:
    train(lambda **kwargs: OwnMinimize(0.1, **kwargs), 4, 3, 6, "32.32", epochs=1)
except ValueError as error:
    print(f"refused: {error}")
