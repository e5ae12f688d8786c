"""Optimizers of one's own, as applications for the SDK write them against Keras 2.6, in `fit` on two replicas."""

import numpy as np
import tensorflow as tf
from keras.optimizer_v2 import learning_rate_schedule, optimizer_v2
from tensorflow import keras
from tensorflow.python import ipu

REPLICAS = 2
ACCUMULATION = 2
MICRO_BATCH = 4
SAMPLES = 64
RATE = 0.05

rng = np.random.RandomState(7)
inputs = rng.randn(SAMPLES, 4).astype("float32")
targets = rng.randn(SAMPLES, 1).astype("float32")
dataset = tf.data.Dataset.from_tensor_slices((inputs, targets)).batch(MICRO_BATCH, drop_remainder=True)


class SGDW(keras.optimizers.Optimizer):
    """SGD with momentum and decoupled weight decay, the velocity in a slot of its own."""

    def __init__(self, learning_rate=0.01, momentum=0.9, weight_decay=0.0, name="SGDW", **kwargs):
        super().__init__(name, **kwargs)
        self._set_hyper("learning_rate", kwargs.get("lr", learning_rate))
        self._set_hyper("momentum", momentum)
        self._set_hyper("decay", self._initial_decay)
        self.weight_decay = weight_decay

    def _create_slots(self, var_list):
        for variable in var_list:
            self.add_slot(variable, "velocity")

    def _prepare_local(self, var_device, var_dtype, apply_state):
        super()._prepare_local(var_device, var_dtype, apply_state)
        apply_state[(var_device, var_dtype)]["momentum"] = tf.identity(self._get_hyper("momentum", var_dtype))

    def _resource_apply_dense(self, grad, var, apply_state=None):
        state = (apply_state or {}).get((var.device, var.dtype.base_dtype))
        state = state or self._fallback_apply_state(var.device, var.dtype.base_dtype)
        velocity = self.get_slot(var, "velocity")
        changed = velocity.assign(state["momentum"] * velocity + grad, use_locking=self._use_locking)
        step = state["lr_t"] * (changed + self.weight_decay * var)
        return var.assign_sub(step, use_locking=self._use_locking)

    def get_config(self):
        return {
            **super().get_config(),
            "learning_rate": self._serialize_hyperparameter("learning_rate"),
            "momentum": self._serialize_hyperparameter("momentum"),
            "weight_decay": self.weight_decay,
        }


class Halving(learning_rate_schedule.LearningRateSchedule):
    def __init__(self, rate, every):
        super().__init__()
        self.rate, self.every = rate, every

    def __call__(self, step):
        return self.rate * 0.5 ** tf.floor(tf.cast(step, tf.float32) / self.every)

    def get_config(self):
        return {"rate": self.rate, "every": self.every}


class Clipped(keras.optimizers.SGD):
    """A stock optimizer that changes its gradients when it gets them."""

    def get_gradients(self, loss, params):
        return [tf.clip_by_norm(gradient, 0.5) for gradient in super().get_gradients(loss, params)]

    def _transform_unaggregated_gradients(self, grads_and_vars):
        return grads_and_vars

    def _aggregate_gradients(self, grads_and_vars):
        return super()._aggregate_gradients(grads_and_vars)

    def _resource_apply_dense(self, grad, var, apply_state=None):
        return super()._resource_apply_dense(tf.clip_by_norm(grad, 0.5), var, apply_state)


def mean_over_replicas(grads_and_vars):
    return [(gradient / REPLICAS, variable) for gradient, variable in grads_and_vars]


def make_model():
    return keras.Sequential([keras.layers.Dense(3, activation="tanh", input_shape=(4,)), keras.layers.Dense(1)])


def trained_by_hand(start, change, epochs=2):
    """Gives the mean gradient of each global batch to `change(number, gradients, weights)`, which returns weights."""
    model = make_model()
    model.set_weights(start)
    batch, number = MICRO_BATCH * REPLICAS * ACCUMULATION, 0
    for _ in range(epochs):
        for first in range(0, SAMPLES, batch):
            rows = slice(first, first + batch)
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(model(inputs[rows]) - targets[rows]))
            gradients = [gradient.numpy() for gradient in tape.gradient(loss, model.trainable_variables)]
            model.set_weights(change(number, gradients, model.get_weights()))
            number += 1
    return model.get_weights()


config = ipu.config.IPUConfig()
config.auto_select_ipus = REPLICAS
config.configure_ipu_system()
strategy = ipu.ipu_strategy.IPUStrategy()


def fit(optimizer, start, epochs=2):
    with strategy.scope():
        model = make_model()
        model.set_weights(start)
        model.set_gradient_accumulation_options(
            gradient_accumulation_steps_per_replica=ACCUMULATION, gradient_accumulation_reduction_method="mean"
        )
        model.compile(optimizer, "mse", steps_per_execution=4)
        model.fit(dataset, epochs=epochs, verbose=0)
    return model


start = make_model().get_weights()

# The optimizer with momentum, decay of weights, a schedule, and the division by the replicas.
with strategy.scope():
    optimizer = SGDW(Halving(RATE, 2), weight_decay=0.1, gradient_transformers=[mean_over_replicas])
assert isinstance(optimizer, optimizer_v2.OptimizerV2) and isinstance(optimizer, keras.optimizers.Optimizer)
velocity = [np.zeros_like(weight) for weight in start]


def momentum_step(number, gradients, weights):
    velocity[:] = [0.9 * before + gradient for before, gradient in zip(velocity, gradients)]
    rate = RATE * 0.5 ** (number // 2)
    return [weight - rate * (fast + 0.1 * weight) for weight, fast in zip(weights, velocity)]


model = fit(optimizer, start)
for ours, expected in zip(model.get_weights(), trained_by_hand(start, momentum_step)):
    np.testing.assert_allclose(ours, expected, atol=1e-5)
np.testing.assert_allclose(optimizer.get_slot(model.trainable_variables[0], "velocity"), velocity[0], atol=1e-5)
assert optimizer.iterations.numpy() == 8
print(f"{type(optimizer).__name__}: {optimizer.iterations.numpy()} updates")

# Hyperparameters are variables that the host changes between runs, and that survive a configuration.
with strategy.scope():
    constant = SGDW(learning_rate=RATE, momentum=0.0, gradient_transformers=[mean_over_replicas])
model = fit(constant, start, epochs=1)
constant.learning_rate = 0.0
before = model.get_weights()
model.fit(dataset, verbose=0)
for ours, expected in zip(model.get_weights(), before):
    np.testing.assert_array_equal(ours, expected)
keras.backend.set_value(model.optimizer.lr, 2 * RATE)
np.testing.assert_allclose(constant.get_config()["learning_rate"], 2 * RATE, rtol=1e-6)
with strategy.scope():
    copy = SGDW.from_config(constant.get_config())
assert copy.get_config()["momentum"] == 0.0
print("hyperparameters done")


# A name is an optimizer of the same family.
with strategy.scope():
    named = make_model()
    named.compile("nadam", "mse")
assert isinstance(named.optimizer, optimizer_v2.OptimizerV2) and named.optimizer._get_hyper("learning_rate") > 0


# A subclass of a stock optimizer: gradients arrive summed over the replicas.
def clipped_step(number, gradients, weights):
    del number
    changed = []
    for gradient, weight in zip(gradients, weights):
        summed = gradient * REPLICAS
        changed.append(weight - RATE * summed * min(1.0, 0.5 / np.linalg.norm(summed)))
    return changed


with strategy.scope():
    clipped = Clipped(RATE)
model = fit(clipped, start)
for ours, expected in zip(model.get_weights(), trained_by_hand(start, clipped_step)):
    np.testing.assert_allclose(ours, expected, atol=1e-5)
print(f"{type(clipped).__name__}: done")


# An optimizer that overrides minimize cannot have its gradients accumulated.
class OwnMinimize(keras.optimizers.SGD):
    def minimize(self, loss, var_list, grad_loss=None, name=None, tape=None):
        return super().minimize(loss, var_list, grad_loss, name, tape)


with strategy.scope():
    refused = OwnMinimize(RATE)
try:
    fit(refused, start)
except ValueError:
    print("an own minimize is refused")
