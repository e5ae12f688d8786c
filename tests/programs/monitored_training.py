"""A sampler of `gcipuinfo` beside a `fit` that runs in the main thread, and trace points around it."""

import json
import os
import threading

import gcipuinfo
import libpvti
import numpy as np
from tensorflow import keras
from tensorflow.python import ipu

REPLICAS = 2
PERIOD_S = 0.05

rng = np.random.RandomState(10)
inputs = rng.randn(512, 16).astype("float32")
targets = inputs.sum(axis=1, keepdims=True)


def number(text):
    """Returns the number of a value with its unit, or None where there is none."""
    if not text or text == "N/A":
        return None
    return float("".join(character for character in text if character in "0123456789.-"))


class Sampler(threading.Thread):
    """Asks for the devices that this process has attached, until told to stop."""

    def __init__(self, inventory):
        super().__init__(daemon=True)
        self.inventory, self.samples, self.errors = inventory, [], []
        self.enough = threading.Event()

    def run(self):
        while not self.enough.wait(PERIOD_S):
            try:
                devices = [dict(device) for device in self.inventory.getDevices()]
            except Exception as error:
                self.errors.append(error)
                continue
            self.samples.append([one for one in devices if one.get("user process id") == str(os.getpid())])


inventory = gcipuinfo.gcipuinfo()
inventory.setUpdateMode(True)
before = [device for device in inventory.getDevices() if device.get("user process id")]
assert before == [], before

config = ipu.config.IPUConfig()
config.auto_select_ipus = REPLICAS
config.configure_ipu_system()
strategy = ipu.ipu_strategy.IPUStrategy()

channel = libpvti.createTraceChannel("training")
sampler = Sampler(inventory)
sampler.start()
with strategy.scope(), libpvti.Tracepoint(channel, "fit"):
    model = keras.Sequential([keras.layers.Dense(64, activation="relu", input_shape=(16,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.Adam(0.01), "mse", steps_per_execution=32)
    history = model.fit(inputs, targets, batch_size=8, epochs=20, verbose=0)
sampler.enough.set()
sampler.join(timeout=120)

assert not sampler.is_alive() and not sampler.errors, sampler.errors
assert history.history["loss"][-1] < history.history["loss"][0]
assert sampler.samples and all(len(sample) == REPLICAS for sample in sampler.samples)
busiest = max(number(device["ipu utilisation"]) or 0.0 for sample in sampler.samples for device in sample)
assert 0.0 < busiest <= 100.0, busiest
assert {device["id"] for device in sampler.samples[-1]} == {"0", "1"}
assert all(number(device["ipu power"]) is None for device in sampler.samples[-1])  # no GCDA_MONITOR
assert json.loads(inventory.checkHealthOfDevices()) == {}
assert len(json.loads(inventory.getDevicesAsJSON())) == len(inventory.getDevices())
print("sampled while training, devices:", len(sampler.samples[-1]))

# After the configuration is reset the devices are free again.
ipu.config.reset_ipu_configuration()
assert not any(device.get("user process id") for device in inventory.getDevices())
print("devices are free")

# Another configuration in the same process.
config = ipu.config.IPUConfig()
config.select_ipus = [3]
config.configure_ipu_system()
(mine,) = [one for one in inventory.getDevices() if one.get("user process id") == str(os.getpid())]
assert mine["id"] == "3"
with ipu.ipu_strategy.IPUStrategy().scope():
    again = keras.Sequential([keras.layers.Dense(1, input_shape=(16,))])
    again.compile("sgd", "mse")
    again.fit(inputs, targets, batch_size=64, verbose=0)
print("done")
