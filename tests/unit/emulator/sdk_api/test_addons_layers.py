"""The addons' layers against stock Keras, TensorFlow's own ops and numbers by hand, and their documented errors."""

from __future__ import annotations

import inspect

import numpy as np
import pytest
import tensorflow as tf

from tf_ipu_dp.emulator.sdk_api import addons
from tf_ipu_dp.emulator.sdk_api.addons.keras import layers
from tf_ipu_dp.emulator.sdk_api.ipu.ops import f8_ops

RNG = np.random.RandomState(0)
BATCH, STEPS, SIZE, UNITS = 3, 5, 4, 6
SEQUENCES = RNG.randn(BATCH, STEPS, SIZE).astype("float32")
IMAGES = RNG.randn(2, 3, 5, 8).astype("float32")
PAIRS = [(layers.LSTM, tf.keras.layers.LSTM), (layers.GRU, tf.keras.layers.GRU)]
CLASSES = {cls.__name__: cls for cls in (layers.LSTM, layers.GRU, layers.Embedding, layers.LayerNormalization,
                                         layers.GroupNormalization, layers.InstanceNormalization, layers.Dropout,
                                         layers.SerialDense, layers.Dense, layers.RecomputationCheckpoint,
                                         layers.AssumeEqualAcrossReplicas)}  # fmt: skip


def with_weights_of(layer, stock, inputs):
    """Builds both layers and gives the first the weights of the second."""
    stock(inputs), layer(inputs)
    weights = [RNG.randn(*weight.shape).astype("float32") for weight in stock.get_weights()]
    stock.set_weights(weights)
    layer.set_weights(weights)


def assert_same(left, right, tolerance=2e-6):
    left, right = tf.nest.flatten(left), tf.nest.flatten(right)
    assert len(left) == len(right)
    for one, other in zip(left, right):
        np.testing.assert_allclose(np.asarray(one), np.asarray(other), atol=tolerance, rtol=1e-5)


@pytest.mark.parametrize(("ours", "stock"), PAIRS)
@pytest.mark.parametrize("time_major", [False, True])
@pytest.mark.parametrize("returned", [{}, {"return_sequences": True, "return_state": True}, {"return_state": True}])
def test_recurrent_layers_equal_keras_with_its_weights_and_gradients(ours, stock, time_major, returned):
    layer, reference = (cls(UNITS, time_major=time_major, **returned) for cls in (ours, stock))
    x = tf.constant(SEQUENCES.transpose(1, 0, 2) if time_major else SEQUENCES)
    with_weights_of(layer, reference, x)
    state = [tf.constant(RNG.randn(BATCH, UNITS).astype("float32")) for _ in range(2 if ours is layers.LSTM else 1)]
    for initial_state in (None, state):
        with tf.GradientTape(persistent=True) as tape:
            tape.watch(x)
            results = [some(x, initial_state=initial_state) for some in (layer, reference)]
            sums = [tf.add_n([tf.reduce_sum(tf.sin(part)) for part in tf.nest.flatten(result)]) for result in results]
        assert isinstance(results[0], type(results[1]))
        assert_same(*results)
        assert_same(
            tape.gradient(sums[0], [x, *layer.trainable_weights]),
            tape.gradient(sums[1], [x, *reference.trainable_weights]),
            tolerance=2e-5,
        )


@pytest.mark.parametrize(("activation", "recurrent"), [("relu", "hard_sigmoid"), ("softmax", "tanh")])
@pytest.mark.parametrize(("ours", "stock"), PAIRS)
def test_recurrent_layers_have_the_activations_of_keras(ours, stock, activation, recurrent):
    layer, reference = (cls(UNITS, activation, recurrent) for cls in (ours, stock))
    with_weights_of(layer, reference, SEQUENCES)
    assert_same(layer(SEQUENCES), reference(SEQUENCES))


def test_a_gru_that_resets_before_the_product_equals_keras():
    layer, reference = (cls(UNITS, reset_after=False) for cls in (layers.GRU, tf.keras.layers.GRU))
    with_weights_of(layer, reference, SEQUENCES)
    assert layer.biases.shape == [3 * UNITS]
    assert_same(layer(SEQUENCES), reference(SEQUENCES))


def test_recurrent_weights_have_the_names_and_shapes_of_the_sdk_and_the_initial_values_of_keras():
    lstm, gru = layers.LSTM(UNITS, name="rnn"), layers.PopnnGRU(UNITS)
    lstm(SEQUENCES), gru(SEQUENCES)
    assert [weight.name for weight in lstm.weights] == ["rnn/kernel:0", "rnn/recurrent_kernel:0", "rnn/biases:0"]
    assert [tuple(weight.shape) for weight in lstm.weights] == [(SIZE, 24), (UNITS, 24), (24,)]
    assert [tuple(weight.shape) for weight in gru.weights] == [(SIZE, 18), (UNITS, 18), (2, 18)]
    np.testing.assert_array_equal(lstm.biases.numpy(), [0] * UNITS + [1] * UNITS + [0] * 2 * UNITS)
    recurrent = lstm.recurrent_kernel.numpy()
    np.testing.assert_allclose(recurrent @ recurrent.T, np.eye(UNITS), atol=1e-5)


def test_the_seed_of_a_recurrent_layer_fixes_its_first_weights():
    one, other = layers.LSTM(UNITS, seed=7), layers.LSTM(UNITS, seed=7)
    one(SEQUENCES), other(SEQUENCES)
    assert_same(one.get_weights(), other.get_weights(), tolerance=0)


@pytest.mark.parametrize(("ours", "stock"), PAIRS)
@pytest.mark.parametrize("time_major", [False, True])
def test_stateful_layers_carry_their_state_like_keras(ours, stock, time_major):
    layer, reference = (cls(UNITS, stateful=True, time_major=time_major) for cls in (ours, stock))
    x = SEQUENCES.transpose(1, 0, 2) if time_major else SEQUENCES
    with_weights_of(layer, reference, x)
    layer.reset_states(), reference.reset_states()
    first = layer(x)
    assert_same(first, reference(x))
    assert_same(layer(x), reference(x))
    start = [np.ones((BATCH, UNITS), "float32")] * layer.state_count
    tensors = [tf.constant(state) for state in start]
    assert_same(layer(x, initial_state=tensors), reference(x, initial_state=tensors))
    layer.reset_states(start), reference.reset_states(start)
    assert_same(layer(x), reference(x))
    layer.reset_states()
    assert_same(layer(x), first)
    assert len(layer.get_weights()) == 3


@pytest.mark.parametrize(("ours", "stock"), PAIRS)
@pytest.mark.parametrize("replicas", [1, 2])
def test_each_replica_of_a_stateful_model_carries_its_own_state(scope, ours, stock, replicas):
    micro_batches = RNG.randn(6, BATCH, STEPS, SIZE).astype("float32")
    dataset = tf.data.Dataset.from_tensor_slices(micro_batches)
    with scope(replicas).scope():
        inputs = tf.keras.Input((STEPS, SIZE), batch_size=BATCH)
        layer = ours(UNITS, stateful=True)
        model = tf.keras.Model(inputs, layer(inputs))
        model.compile(steps_per_execution=6 // replicas)
        outputs = model.predict(dataset, verbose=0)
    reference = stock(UNITS, stateful=True)
    reference.build(SEQUENCES.shape)
    reference.set_weights(layer.get_weights())
    expected = [None] * len(micro_batches)
    for replica in range(replicas):
        reference.reset_states()
        for number in range(replica, len(micro_batches), replicas):
            expected[number] = reference(micro_batches[number])
    assert_same(outputs, np.concatenate(expected))


@pytest.mark.parametrize(("ours", "stock"), PAIRS)
def test_a_stateful_layer_carries_its_state_in_a_session_too(ours, stock):
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        layer = ours(UNITS, stateful=True)
        output = layer(tf.constant(SEQUENCES))
        session.run(tf.compat.v1.global_variables_initializer())
        found = [session.run(output) for _ in range(3)]
        weights = session.run(layer.weights)
    reference = stock(UNITS, stateful=True)
    reference.build(SEQUENCES.shape)
    reference.set_weights(weights)
    for one in found:
        assert_same(one, reference(SEQUENCES))


def test_a_stateful_layer_needs_a_batch_size():
    with pytest.raises(ValueError, match="batch size"):
        tf.keras.Sequential([tf.keras.layers.Input((STEPS, SIZE)), layers.LSTM(UNITS, stateful=True)])


@pytest.mark.parametrize("as_list", [False, True])
def test_states_are_inputs_of_a_functional_model(as_list):
    inputs = [tf.keras.Input((STEPS, SIZE)), tf.keras.Input((UNITS,)), tf.keras.Input((UNITS,))]

    def model_of(cls):
        layer = cls(UNITS, return_state=True)
        return tf.keras.Model(inputs, layer(inputs) if as_list else layer(inputs[0], initial_state=inputs[1:]))

    model, reference = model_of(layers.LSTM), model_of(tf.keras.layers.LSTM)
    model.set_weights(reference.get_weights())
    values = [SEQUENCES, *RNG.randn(2, BATCH, UNITS).astype("float32")]
    assert_same(model.predict(values, verbose=0), reference.predict(values, verbose=0))


@pytest.mark.parametrize("ours", [layers.LSTM, layers.GRU])
@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"use_bias": False}, ValueError),
        ({"kernel_regularizer": "l2"}, ValueError),
        ({"activity_regularizer": "l2"}, ValueError),
        ({"bias_constraint": "non_neg"}, ValueError),
        ({"recurrent_dropout": 0.5}, ValueError),
        ({"go_backwards": True}, ValueError),
        ({"unroll": True}, ValueError),
        ({"implementation": 0}, ValueError),
        ({"activation": "selu"}, ValueError),
        ({"recurrent_activation": "relu"}, ValueError),
        ({"activation": None}, TypeError),
        ({"activation": tf.keras.activations.tanh}, TypeError),
        ({"dtype": "float64"}, ValueError),
        ({"dtype": "bfloat16"}, ValueError),
        ({"no_such_argument": 1}, TypeError),
    ],
)
def test_recurrent_layers_refuse_what_the_ipu_lacks(ours, arguments, error):
    with pytest.raises(error):
        ours(UNITS, **arguments)


def test_recurrent_layers_take_activations_of_tensorflows_math():
    layer = layers.LSTM(UNITS, tf.math.tanh, tf.math.sigmoid)
    assert (layer.activation, layer.recurrent_activation) == ("tanh", "sigmoid")


def test_recurrent_layers_refuse_masks_and_inputs_of_another_rank():
    with pytest.raises(ValueError, match="rank 3"):
        layers.LSTM(UNITS)(SEQUENCES[0])
    with pytest.raises(NotImplementedError, match="mask"):
        layers.GRU(UNITS)(SEQUENCES, mask=tf.ones([BATCH, STEPS], tf.bool))
    masked = tf.keras.layers.Embedding(10, SIZE, mask_zero=True)
    with pytest.raises(NotImplementedError, match="mask"):
        tf.keras.Sequential([tf.keras.layers.Input((STEPS,)), masked, layers.LSTM(UNITS)])


def test_input_dropout_has_one_mask_for_all_steps_and_only_in_training():
    layer = layers.LSTM(1, dropout=0.5, dropout_seed=[1, 2], return_sequences=True)
    x = tf.ones([BATCH, STEPS, 8])
    layer(x, training=False)
    # With these weights the output depends on the sum of the kept inputs alone, so equal steps mean equal masks.
    kernel = np.zeros((8, 4), "float32")
    kernel[:, 2] = 0.1
    layer.set_weights([kernel, np.zeros((1, 4)), np.array([0, -50, 0, 0])])
    plain, dropped = layer(x, training=False).numpy(), layer(x, training=True).numpy()
    np.testing.assert_allclose(dropped, np.repeat(dropped[:, :1], STEPS, axis=1), rtol=1e-6)
    assert np.ptp(plain) < 1e-6 < np.ptp(dropped)
    assert_same(layer(x, training=tf.constant(False)), dropped)


@pytest.mark.parametrize("ours", [layers.LSTM, layers.GRU])
@pytest.mark.parametrize(("policy", "weights"), [("float16", tf.float16), ("mixed_float16", tf.float32)])
def test_recurrent_layers_compute_in_float16(ours, policy, weights):
    layer, reference = ours(UNITS, dtype=policy), ours(UNITS)
    x = SEQUENCES.astype("float16")
    layer(x), reference(x)
    reference.set_weights([weight.astype("float32") for weight in layer.get_weights()])
    output = layer(x)
    assert (output.dtype, layer.kernel.dtype) == (tf.float16, weights)
    assert_same(output, reference(x), tolerance=4e-3)


@pytest.mark.parametrize("name", ["options", "options_bwd"])
@pytest.mark.parametrize("make", [layers.LSTM, layers.GRU, addons.v1.layers.PopnnLSTM, addons.v1.layers.PopnnGRU])
def test_a_recurrent_layer_with_a_negative_share_of_memory_is_refused_when_called(make, name):
    layer = make(UNITS, **{name: {"availableMemoryProportion": -123.0}})
    with tf.Graph().as_default(), pytest.raises(tf.errors.InternalError, match=rf"{name} of .*=-123\.0: Value must be"):
        layer(tf.constant(SEQUENCES))


@pytest.mark.parametrize("suffix", ["", ".h5", ".keras"])
def test_models_with_these_layers_are_saved_and_loaded(tmp_path, suffix):
    if suffix == ".keras" and not hasattr(tf.keras, "saving"):
        pytest.skip("This Keras has no such format.")
    model = tf.keras.Sequential(
        [
            tf.keras.layers.Input((STEPS,), batch_size=BATCH, dtype="int32"),
            layers.Embedding(10, SIZE, serialization_factor=2),
            layers.LayerNormalization(axis=[-1]),
            layers.GroupNormalization(2, strided_channel_grouping=False),
            layers.InstanceNormalization(gamma_initializer="ones", beta_initializer="zeros"),
            layers.Dropout(0.5, noise_shape=[BATCH, 1, SIZE], seed=[3, 4]),
            layers.LSTM(UNITS, return_sequences=True, options={"availableMemoryProportion": "0.2"}),
            layers.GRU(UNITS, stateful=True, name="last"),
            layers.SerialDense(4, 2, "kernel_rows"),
            layers.Dense(2, activation="tanh"),
            layers.RecomputationCheckpoint(),
            layers.AssumeEqualAcrossReplicas(),
        ]
    )
    path = str(tmp_path / f"model{suffix}")
    model.save(path)
    again = tf.keras.models.load_model(path, custom_objects=CLASSES)
    ids = RNG.randint(0, 10, (BATCH, STEPS)).astype("int32")
    for _ in range(2):
        assert_same(again.predict(ids, BATCH, verbose=0), model.predict(ids, BATCH, verbose=0))
    for one, other in zip(model.layers, again.layers):
        assert type(one) is type(other)
        assert one.get_config() == other.get_config()


def test_a_model_of_these_layers_is_trained_on_replicas(scope):
    ids, classes = RNG.randint(1, 10, (64, STEPS)).astype("int32"), RNG.randint(0, 2, 64).astype("int32")
    ids[:, 0] = classes
    with scope(2).scope():
        inputs = tf.keras.Input((STEPS,), batch_size=4, dtype="int32")
        x = layers.LayerNormalization()(layers.Embedding(10, 8)(inputs))
        x = layers.LSTM(8)(layers.Dropout(0.1)(x))
        model = tf.keras.Model(inputs, tf.keras.layers.Dense(2)(x))
        loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(addons.keras.optimizers.AdamIpuOptimizer(0.01), loss, steps_per_execution=4)
        model.set_gradient_accumulation_options(2)
        history = model.fit(ids, classes, batch_size=4, epochs=10, verbose=0).history["loss"]
    assert history[-1] < 0.5 * history[0]


def group_norm_by_hand(x, groups, strided, epsilon=1e-3):
    """Channels last; each group of each sample by itself."""
    y = np.empty_like(x)
    size = x.shape[-1] // groups
    for group in range(groups):
        members = slice(group, None, groups) if strided else slice(group * size, (group + 1) * size)
        part = x[..., members]
        axes = tuple(range(1, x.ndim))
        mean, variance = part.mean(axes, keepdims=True), part.var(axes, keepdims=True)
        y[..., members] = (part - mean) / np.sqrt(variance + epsilon)
    return y


@pytest.mark.parametrize("strided", [True, False])
@pytest.mark.parametrize("channels_axis", [-1, 3, 1])
def test_group_normalization_is_what_its_definition_says(strided, channels_axis):
    layer = layers.GroupNorm(4, channels_axis, strided_channel_grouping=strided)
    x = IMAGES.transpose(0, 3, 1, 2) if channels_axis == 1 else IMAGES
    layer(x)
    gamma, beta = RNG.randn(2, 8).astype("float32")
    layer.set_weights([gamma, beta])
    result = layer(x).numpy()
    result = result.transpose(0, 2, 3, 1) if channels_axis == 1 else result
    assert_same(result, group_norm_by_hand(IMAGES, 4, strided) * gamma + beta, tolerance=1e-5)
    assert_same(layer(x, training=True), layer(x, training=False), tolerance=0)


def test_instance_normalization_has_a_group_per_channel():
    layer = layers.InstanceNorm(center=False, scale=False)
    assert_same(layer(IMAGES), group_norm_by_hand(IMAGES, 8, True), tolerance=1e-5)


def test_group_normalization_without_initializers_starts_like_any_keras_weight():
    layer = layers.GroupNormalization()
    layer(IMAGES)
    assert len(set(layer.gamma.numpy())) == len(set(layer.beta.numpy())) == 8


@pytest.mark.parametrize("arguments", [{"groups": 3}, {"groups": 16}, {"channels_axis": 2}, {"channels_axis": -3}])
def test_group_normalization_refuses_channels_that_do_not_fit(arguments):
    with pytest.raises(ValueError):
        layers.GroupNormalization(**arguments)(np.zeros((2, 5, 4, 8), "float32"))


@pytest.mark.parametrize("axis", [-1, [1], (1, 2), [-1, -2, -3]])
def test_layer_normalization_equals_keras(axis):
    layer, reference = layers.LayerNorm(axis), tf.keras.layers.LayerNormalization(axis)
    with_weights_of(layer, reference, IMAGES)
    assert_same(layer(IMAGES), reference(IMAGES), tolerance=1e-5)


def test_layer_normalization_keeps_float16():
    layer = layers.LayerNorm(dtype="float16")
    output = layer(IMAGES.astype("float16") * 100)
    assert output.dtype == tf.float16
    assert_same(output, layers.LayerNorm()(IMAGES * 100), tolerance=1e-2)


def test_layer_normalization_needs_every_dimension_the_batch_included():
    with pytest.raises(ValueError, match="batch"):
        layers.LayerNormalization()(tf.keras.Input((4,)))
    assert layers.LayerNormalization()(tf.keras.Input((4,), batch_size=2)).shape == [2, 4]


def test_layer_normalization_refuses_what_the_ipu_lacks():
    with pytest.raises(NotImplementedError, match="gamma_regularizer"):
        layers.LayerNormalization(gamma_regularizer="l2")
    with pytest.raises(NotImplementedError, match="beta_constraint"):
        layers.LayerNormalization(beta_constraint="non_neg")
    for axis in (4, [1, 1], [3, -1]):
        with pytest.raises(ValueError):
            layers.LayerNormalization(axis)(IMAGES)


def test_dropout_scales_what_it_keeps_and_repeats_itself_with_a_seed():
    x = tf.ones([64, 64])
    layer = layers.Dropout(0.25, seed=[1, 2])
    first = layer(x, training=True).numpy()
    assert set(np.unique(first)) == {0, np.float32(1 / 0.75)}
    assert 0.2 < (first == 0).mean() < 0.3
    assert_same(layer(x, training=True), first, tolerance=0)
    assert_same(layer(x), x, tolerance=0)
    assert (layers.Dropout(0.25)(x, training=True).numpy() != first).any()
    assert_same(layers.Dropout(0.25, noise_shape=[], seed=[1, 2])(x, training=True), first, tolerance=0)
    column = layers.Dropout(0.5, noise_shape=[64, 1], ref=True)(x, training=True).numpy()
    np.testing.assert_array_equal(column, np.repeat(column[:, :1], 64, axis=1))


@pytest.mark.parametrize(
    "arguments",
    [
        {"rate": 1},
        {"rate": 0.5, "seed": [1, 2, 3]},
        {"rate": 0.5, "seed": 1},
        {"rate": 0.5, "noise_shape": [2]},
        {"rate": 0.5, "noise_shape": [3, 4]},
    ],
)
def test_dropout_refuses_at_the_training_call(arguments):
    layer = layers.Dropout(**arguments)
    layer(tf.ones([2, 4]), training=False)
    with pytest.raises(ValueError):
        layer(tf.ones([2, 4]), training=True)


def test_embedding_equals_keras_but_its_gradient_is_dense():
    layer, reference = layers.Embedding(10, 4, serialization_factor=5), tf.keras.layers.Embedding(10, 4)
    ids = tf.constant([[1, 2, 2], [9, 0, 2]])
    with_weights_of(layer, reference, ids)
    gradients = []
    for some in (layer, reference):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.sin(some(ids)))
        gradients.append(tape.gradient(loss, some.embeddings))
    assert_same(layer(ids, inputs_are_sorted=True), reference(ids), tolerance=0)
    assert isinstance(gradients[0], tf.Tensor)
    assert_same(gradients[0], tf.convert_to_tensor(gradients[1]))


def test_embedding_refuses_what_the_ipu_lacks():
    for name, value in {"embeddings_regularizer": "l2", "activity_regularizer": "l2", "mask_zero": True,
                        "embeddings_constraint": "non_neg", "input_length": 3}.items():  # fmt: skip
        with pytest.raises(NotImplementedError, match=name):
            layers.Embedding(10, 4, **{name: value})
    with pytest.raises(ValueError, match="rank 2"):
        layers.Embedding(10, 4)(tf.constant([1, 2]))
    with pytest.raises(ValueError, match="serialization_factor"):
        layers.Embedding(10, 4, serialization_factor=3)(tf.constant([[1]]))


def test_embedding_keeps_large_ids_under_a_float16_policy():
    layer = layers.Embedding(5000, 1, dtype="mixed_float16", embeddings_initializer="zeros")
    layer(tf.constant([[0]]))
    layer.set_weights([np.arange(5000, dtype="float32").reshape(-1, 1) / 5000])
    output = layer(tf.constant([[4097.0]]))
    assert output.dtype == tf.float16
    assert_same(output, [[[4097 / 5000]]], tolerance=1e-3)


@pytest.mark.parametrize(
    ("factor", "dimension"), [(3, "input_columns"), (2, "input_rows_kernel_columns"), (3, "kernel_rows")]
)
@pytest.mark.parametrize("x", [SEQUENCES, SEQUENCES[:, 0]])
def test_serial_dense_equals_dense(factor, dimension, x):
    layer = layers.SerialDense(6, factor, dimension, activation="relu")
    reference = tf.keras.layers.Dense(6, activation="relu")
    with_weights_of(layer, reference, x)
    assert_same(layer(x), reference(x))
    assert layer(x).shape == reference(x).shape


def test_serial_dense_refuses_factors_and_dimensions_that_do_not_fit():
    with pytest.raises(ValueError, match="a_columns"):
        layers.SerialDense(6, 2, "a_columns")
    for factor, dimension in [(2, "input_columns"), (3, "input_rows_kernel_columns"), (4, "kernel_rows")]:
        with pytest.raises(ValueError, match="divide"):
            layers.SerialDense(6, factor, dimension)(SEQUENCES[:, 0])


def test_dense_is_the_stock_layer_for_ordinary_inputs():
    layer, reference = layers.Dense(3, activation="relu"), tf.keras.layers.Dense(3, activation="relu")
    with_weights_of(layer, reference, SEQUENCES)
    assert_same(layer(SEQUENCES), reference(SEQUENCES))
    with pytest.raises(ValueError, match=r"\[-32, 31\]"):
        layers.Dense(3, kernel_scale=32)
    with pytest.raises(NotImplementedError, match="EffectiveTransformer"):
        layers.EffectiveTransformer()


@pytest.mark.parametrize("fmt", f8_ops.Format)
def test_dense_multiplies_8_bit_floats_by_a_kernel_of_8_bit_floats(scope, fmt):
    x = SEQUENCES.astype("float16")
    with scope(1).scope():
        values = tf.keras.Input(SEQUENCES.shape[1:], batch_size=BATCH, dtype="float16")
        metadata = f8_ops.create_metadata(fmt, 2)
        converted = layers.ConvertToF8()([values, metadata])
        dense = layers.Dense(3, kernel_format=fmt, kernel_scale=-3, activation="relu", bias_initializer="ones")
        model = tf.keras.Model(values, [dense(converted), layers.ConvertFromF8(tf.float32)(converted)])
        output, inputs = model.predict(x, batch_size=BATCH, verbose=0)
    assert (output.dtype, inputs.dtype) == ("float16", "float32")
    assert [weight.dtype for weight in dense.get_weights()] == ["float32", "uint8", "uint8"]
    kernel = f8_ops.convert_from_f8([dense.kernel, dense.kernel_metadata], tf.float32).numpy()
    np.testing.assert_array_equal(inputs, f8_ops.convert_from_f8(f8_ops.convert_to_f8(x, metadata), tf.float32))
    assert 0 < np.abs(inputs - x).max() < 0.3
    np.testing.assert_allclose(output, np.maximum(inputs @ kernel + 1, 0), rtol=2e-3, atol=2e-3)


def test_a_kernel_of_8_bit_floats_starts_with_given_codes_and_is_saved():
    layer = layers.Dense(2, kernel_format="F152", kernel_data_initializer=tf.keras.initializers.Constant(0x40))
    output = layer([tf.constant([[0x48, 0x40]], tf.uint8), f8_ops.create_metadata(f8_ops.Format.F143)])
    np.testing.assert_array_equal(output, [[3, 3]])  # (2 + 1) x 1
    again = layers.Dense.from_config(layer.get_config())
    assert again.get_config() == layer.get_config()
    assert again.kernel_format is f8_ops.Format.F152 and again.kernel_data_initializer.get_config() == {"value": 0x40}


@pytest.mark.parametrize("from_logits", [True, False])
def test_ctc_loss_is_the_mean_of_tensorflows(from_logits):
    logits = tf.constant(RNG.randn(8, 2, 5).astype("float32"))
    labels, label_length, data_length = np.array([[1, 2, 2], [4, 3, 0]]), np.array([3, 2]), np.array([8, 6])
    expected = tf.nn.ctc_loss(labels, logits, label_length, data_length, blank_index=0)
    data = logits if from_logits else tf.nn.log_softmax(logits)
    loss = layers.CTCLoss(from_logits=from_logits)(labels, data, label_length, data_length)
    assert loss.shape == [1]
    assert_same(loss, [np.mean(expected)], tolerance=1e-5)


@pytest.mark.parametrize("from_logits", [True, False])
def test_ctc_layers_decode_the_likely_labels(from_logits):
    best = np.array([[0, 3], [3, 3], [3, 0], [0, 1], [2, 1], [0, 4]])  # [time, batch]; the blank is 0
    logits = tf.one_hot(best, 5) * 20
    data = logits if from_logits else tf.nn.log_softmax(logits)
    lengths = tf.constant([6, 5])
    labels = layers.CTCPredictionsLayer(from_logits=from_logits)(data, lengths)
    np.testing.assert_array_equal(labels, [[3, 2, 0, 0, 0, 0], [3, 1, 0, 0, 0, 0]])
    decode = layers.CTCInferenceLayer(top_paths=2, from_logits=from_logits)
    probabilities, found_lengths, paths = decode(data, lengths)
    assert (probabilities.shape, found_lengths.shape, paths.shape) == ([2, 2], [2, 2], [2, 2, 6])
    np.testing.assert_array_equal(found_lengths[:, 0], [2, 2])
    np.testing.assert_array_equal(paths[0, 0, :2], [3, 2])


def test_layers_for_the_compiler_hand_their_inputs_through():
    inputs = {"a": tf.constant([1.0]), "b": (tf.constant(2), tf.constant(3))}
    for layer in (layers.RecomputationCheckpoint(), layers.AssumeEqualAcrossReplicas(inplace=True)):
        assert_same(layer(inputs), inputs, tolerance=0)
        assert isinstance(layer, layers.ipu_layer.IPULayer)


@pytest.mark.parametrize(("ours", "stock"), [*PAIRS, (layers.LayerNormalization, tf.keras.layers.LayerNormalization)])
def test_arguments_of_keras_come_in_its_order_and_with_its_defaults(ours, stock):
    mine, theirs = (inspect.signature(cls.__init__).parameters for cls in (ours, stock))
    positional = [name for name in theirs if name != "kwargs"]
    assert {name: mine[name].default for name in positional} == {name: theirs[name].default for name in positional}
    # After these the SDK has `dropout_seed`, which Keras does not have.
    last = positional.index("dropout") + 1 if "dropout" in positional else len(positional)
    assert list(mine)[:last] == positional[:last]


def test_the_automatic_pipeline_is_refused_by_name():
    with pytest.raises(ImportError, match="auto_pipeline"):
        from tf_ipu_dp.emulator.sdk_api.addons.keras.experimental import auto_pipeline  # noqa: F401


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize(("kind", "stock"), [("LSTM", tf.keras.layers.LSTM), ("GRU", tf.keras.layers.GRU)])
def test_tf1_layers_equal_keras_with_one_kernel(dynamic, kind, stock):
    layer = getattr(addons.v1.layers, f"Popnn{'Dynamic' if dynamic else ''}{kind}")(UNITS)
    arguments = {} if kind == "LSTM" else {"reset_after": False}
    reference = stock(UNITS, time_major=True, return_sequences=True, return_state=True, **arguments)
    x = tf.constant(SEQUENCES.transpose(1, 0, 2))
    lengths = np.array([5, 2, 3])
    given = {"seq_len": lengths} if dynamic else {}
    layer(x, **given), reference(x)
    kernel, recurrent, bias = (RNG.randn(*weight.shape).astype("float32") for weight in reference.get_weights())
    reference.set_weights([kernel, recurrent, bias])
    layer.set_weights([np.concatenate([kernel, recurrent]), bias])
    outputs, state = layer(x, **given)
    for sample in range(BATCH):
        end = lengths[sample] if dynamic else STEPS
        expected, h, *c = reference(x[:end, sample : sample + 1])
        assert_same(outputs[:end, sample], expected[:, 0])
        assert_same(outputs[end:, sample], np.zeros((STEPS - end, UNITS)))
        assert_same((state.c if c else state)[sample], (c[0] if c else h)[0])
    if kind == "LSTM":
        with pytest.raises(ValueError, match="LSTMStateTuple"):
            layer(x, initial_state=(state.c, state.h), **given)


def test_tf1_layers_run_in_a_graph():
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        x = tf.compat.v1.placeholder(tf.float32, [STEPS, None, SIZE])
        outputs = addons.v1.layers.PopnnGRU(UNITS, return_state=False, name="gru")(x)
        assert [variable.name for variable in tf.compat.v1.trainable_variables()] == ["gru/kernel:0", "gru/biases:0"]
        session.run(tf.compat.v1.global_variables_initializer())
        assert session.run(outputs, {x: SEQUENCES.transpose(1, 0, 2)}).shape == (STEPS, BATCH, UNITS)


def test_the_tf1_gru_with_attention_is_refused_by_name():
    with pytest.raises(NotImplementedError, match="PopnnAUGRU"):
        addons.v1.layers.PopnnAUGRU(UNITS)
