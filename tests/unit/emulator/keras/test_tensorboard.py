"""What TensorBoard callbacks write for models on the device."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

X = np.random.RandomState(6).randn(32, 3).astype("float32")
Y = X.sum(axis=1, keepdims=True)


def events(folder):
    """Returns everything that was written, file after file."""
    for path in sorted(folder.glob("events*")):
        for record in tf.data.TFRecordDataset(str(path)):
            yield tf.compat.v1.Event.FromString(record.numpy())


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_callback_writes_the_logs_of_every_execution_and_the_graph(scope, tmp_path, replicas, accumulation):
    # Keras' later releases call this callback for batches only if it measures them.
    callback = tf.keras.callbacks.TensorBoard(
        str(tmp_path), update_freq=1, write_graph=True, write_steps_per_second=True, profile_batch=0
    )
    logs = []
    recorder = tf.keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, given: logs.append(given["loss"]))
    with scope(replicas).scope():
        model = tf.keras.Sequential([tf.keras.layers.Dense(1, input_shape=(3,), name="only")])
        model.set_gradient_accumulation_options(accumulation)
        model.compile("sgd", "mse", steps_per_execution=4 // replicas)
        data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(4, drop_remainder=True)
        model.fit(data, epochs=2, verbose=0, callbacks=[callback, recorder])

    written = list(events(tmp_path / "train"))
    losses = [
        (event.step, float(tf.make_ndarray(value.tensor)))
        for event in written
        for value in event.summary.value
        if value.tag == "batch_loss"
    ]
    assert [step for step, _ in losses] == [number * 4 // replicas for number in (1, 2, 3, 4)]
    np.testing.assert_allclose([loss for _, loss in losses], logs, rtol=1e-6)
    graphs = [tf.compat.v1.GraphDef.FromString(event.graph_def) for event in written if event.graph_def]
    assert len(graphs) == 1
    assert any("IteratorGetNext" in node.op for part in (graphs[0], *graphs[0].library.function)
               for node in getattr(part, "node", None) or part.node_def)  # fmt: skip
