"""Data of users: what functions return and what paths have, as splits and facts, and the sentences for mistakes."""

from __future__ import annotations

import dataclasses
import re

import numpy as np
import pytest
import tensorflow as tf

import tf_ipu_dp
from tf_ipu_dp import cli, user_code
from tf_ipu_dp.config import train_flags
from tf_ipu_dp.datasets import facts, own_data, own_paths
from tf_ipu_dp.datasets.info import DatasetInfo, Group, TensorInfo

RANDOM = np.random.RandomState(0)
FLOATS = RANDOM.normal(size=(20, 3))
LABELS = np.arange(20) % 4
WEIGHTS = np.linspace(0, 2, 20)


def load(returned, *words):
    """Returns the data of a function that returns this."""
    reference = user_code.register(lambda: returned, "data")
    return own_data.load(train_flags.parse([f"--dataset={reference}", *words]))


def refusal(returned, *words):
    with pytest.raises(cli.UsageError) as caught:
        load(returned, *words)
    assert len(caught.value.sentences) == 1
    return str(caught.value)


def test_arrays_of_any_structure_are_described_and_gathered():
    inputs = {"b": FLOATS, "a": (np.zeros([20], np.int64), np.ones([20, 2, 2], bool))}
    targets = (FLOATS[:, 0], LABELS.reshape(20, 1) * 1.5)
    found = load(((inputs, targets), (inputs, targets)))
    assert found.facts.inputs == Group(
        ("a", "b"), (Group((), (TensorInfo((), "int32"), TensorInfo((2, 2), "bool"))), TensorInfo((3,), "float32"))
    )
    assert found.facts.targets == Group((), (TensorInfo((), "float32"), TensorInfo((1,), "float32")))
    assert found.facts.input_shape == {"a": ((), (2, 2)), "b": (3,)}
    assert not found.facts.is_classification
    np.testing.assert_array_equal(found.validation.read_targets(range(3, 7))[0], FLOATS[3:7, 0].astype(np.float32))
    again = DatasetInfo.from_json(found.facts.to_json())
    assert again == found.facts


def test_whole_numbers_are_classes_and_8_bit_images_are_images():
    found = load(((FLOATS, LABELS[:, None]), (FLOATS, LABELS[:, None])))
    assert found.facts.classes == 4 and found.facts.inputs == TensorInfo((3,), "float32")
    images = RANDOM.randint(0, 256, (20, 8, 6)).astype(np.uint8)
    found = load(((images, LABELS), (images, LABELS)), "--image_size=28")
    assert (found.facts.height, found.facts.width, found.facts.channels, found.facts.classes) == (28, 28, 1, 4)
    assert found.facts.inputs is None and found.train.images.shape == (20, 28, 28, 1)


def test_a_share_is_held_out_by_the_seed_and_nothing_is_lost():
    numbers = np.arange(50, dtype=np.float32)[:, None]
    data = tf_ipu_dp.Data((numbers, numbers))
    found, again = (load(data, "--validation_split=0.1", "--seed=3") for _ in range(2))
    assert (found.facts.train_samples, found.facts.validation_samples) == (45, 5)
    together = np.concatenate([found.train.inputs, found.validation.inputs])
    assert sorted(together.ravel()) == list(range(50))
    np.testing.assert_array_equal(found.validation.inputs, again.validation.inputs)
    other = load(data, "--validation_split=0.1", "--seed=4")
    assert not np.array_equal(found.validation.inputs, other.validation.inputs)


@pytest.mark.parametrize(
    "rows",
    [[[1, 2], [3]], [FLOATS, FLOATS[:, :2]], tf.ragged.constant([[1, 2], [3]])],
    ids=["lists", "arrays", "ragged"],
)
def test_rows_of_different_lengths_are_refused_with_what_fills_them_up(rows):
    assert refusal(((rows, LABELS), (FLOATS, LABELS))) == (
        "--dataset=__main__:data has rows of different lengths in the training inputs. Fill them up, for instance with "
        "tf.keras.utils.pad_sequences; several inputs or targets are a tuple or a dictionary, not a list."
    )
    two = refusal((([FLOATS, FLOATS], LABELS), (FLOATS, LABELS)))
    assert two.endswith("Several inputs or targets are a tuple or a dictionary of arrays, not a list.")


def test_streams_are_described_by_their_samples():
    stream = tf.data.Dataset.from_tensor_slices((FLOATS, LABELS))
    found = load(tf_ipu_dp.Data(stream, stream.take(7), classes=4))
    assert found.facts.streamed and found.facts.classes == 4
    assert (found.facts.train_samples, found.facts.validation_samples) == (20, 7)
    np.testing.assert_array_equal(found.validation.read_targets(range(2, 7)), LABELS[2:7])
    batched = refusal((stream.batch(4), stream))
    assert batched.endswith(" streams training batches. Leave out .batch(): batches are made of single samples.")
    ragged = stream.map(lambda inputs, label: (inputs[: label + 1], label))
    assert "whose shapes differ or are not known; all samples need the same shape. Pad" in refusal((ragged, stream))
    unknown = stream.filter(lambda _, label: label < 2)
    assert "streams training samples without a known length" in refusal((unknown, stream))
    assert load(tf_ipu_dp.Data(unknown, stream, train_samples=10, classes=4)).facts.train_samples == 10


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        (None, "returned None. It returns ((inputs, targets)"),
        ([FLOATS, FLOATS, FLOATS], "returned a list of 3 (an array of 20 x 3 float64, "),
        (tf_ipu_dp.Data(FLOATS), "returned an array of 20 x 3 float64 for training. It is a pair"),
        (((FLOATS, LABELS[:19]), (FLOATS, LABELS)), "has arrays of 19 or 20 samples for training; all need the same"),
        (((FLOATS[:0], LABELS[:0]), (FLOATS, LABELS)), "has no samples for training."),
        (
            ((FLOATS, LABELS), (FLOATS[:, :2], LABELS)),
            "has inputs of 3 float32 for training, but of 2 float32 for valid",
        ),
        (((np.array(["a"] * 20), LABELS), (FLOATS, LABELS)), "and models take numbers. Turn texts into numbers"),
        (((FLOATS, LABELS - 1), (FLOATS, LABELS)), "has the label -1 among labels that are 0 to 3 for 4 classes."),
        (
            tf_ipu_dp.Data((FLOATS, LABELS), (FLOATS, LABELS), classes=3),
            "has the label 3 among labels that are 0 to 2 for 3 classes.",
        ),
        (
            tf_ipu_dp.Data((FLOATS, LABELS), (FLOATS, LABELS), class_names=["a", "b"]),
            "has the label 3 among labels that are 0 to 1 for 2 classes.",
        ),
        (((np.where(FLOATS > 1, np.nan, FLOATS), LABELS), (FLOATS, LABELS)), "has NaN or infinite numbers in the tr"),
        (((np.full([20], 2**40), LABELS), (FLOATS, LABELS)), "that do not fit 32 bits"),
        (((FLOATS, LABELS, FLOATS), (FLOATS, LABELS)), "has 3 float32 for each sample in the training weights; a wei"),
        (((FLOATS, LABELS, -WEIGHTS), (FLOATS, LABELS)), "has -2 among the training weights; a weight is 0 or more."),
        (((FLOATS, LABELS, WEIGHTS[:7]), (FLOATS, LABELS)), "has arrays of 7 or 20 samples for training; all need th"),
        (((FLOATS, LABELS, np.full(20, np.inf)), (FLOATS, LABELS)), "has NaN or infinite numbers in the training wei"),
    ],
)
def test_wrong_returns_are_one_sentence(returned, words):
    said = refusal(returned)
    assert words in said and said.startswith("--dataset=__main__:data ")


def test_weights_are_kept_with_their_samples_and_classes_without_samples_are_named():
    found = load(((FLOATS, LABELS, WEIGHTS), (FLOATS[:5], LABELS[:5])))
    assert found.facts.weighted and found.facts.taken_for.endswith(", weighted")
    np.testing.assert_array_equal(found.train.read_weights(range(3, 6)), WEIGHTS[3:6].astype(np.float32))
    assert found.validation.read_weights(range(5)) is None
    assert found.train.checksum(0) != load(((FLOATS, LABELS), (FLOATS[:5], LABELS[:5]))).train.checksum(0)
    held = load(tf_ipu_dp.Data((np.arange(20.0), np.arange(20.0), np.arange(20.0))))  # each keeps its own
    np.testing.assert_array_equal(held.validation.read_weights(range(4)), held.validation.read_targets(range(4)))
    images = load(((np.zeros([20, 8, 8], np.uint8), LABELS, WEIGHTS), (np.zeros([4, 8, 8], np.uint8), LABELS[:4])))
    np.testing.assert_array_equal(images.train.read_weights(range(20)), WEIGHTS.astype(np.float32))
    named = tf_ipu_dp.Data((FLOATS, LABELS), (FLOATS, LABELS), class_names=list("abcdef"))
    assert load(named).facts.taken_for.endswith("6 classes, without training samples of the classes e, f")
    gap = load(((FLOATS, np.where(LABELS == 1, 0, LABELS)), (FLOATS, LABELS))).facts.taken_for
    assert gap == "arrays, 3 float32 to 4 classes, without training samples of the class 1"
    many = load(tf_ipu_dp.Data((FLOATS, LABELS), (FLOATS, LABELS), classes=20)).facts.taken_for
    assert many.endswith("of the classes 4, 5, 6 and 13 more")
    assert facts.from_json(facts.to_json(found.facts)) == found.facts


def from_path(path, *words):
    cfg = train_flags.parse([f"--dataset={path}", *words])
    assert facts.is_own_path(cfg)
    own_paths.require_known(path, str(path))
    return own_data.load(cfg)


def write_images(folder, sizes):
    for name, count in sizes.items():
        (folder / name).mkdir(parents=True)
        for number in range(count):
            image = np.full([30, 34, 3], 20 * number, np.uint8)
            (folder / name / f"{number}.png").write_bytes(tf.io.encode_png(image).numpy())


def test_a_folder_of_images_for_each_class(tmp_path):
    write_images(tmp_path / "one", {"cat": 6, "dog": 4})
    found = from_path(tmp_path / "one", "--validation_split=0.3")
    assert (found.facts.height, found.facts.width, found.facts.channels) == (30, 34, 3)
    assert found.facts.class_names == ("cat", "dog") and found.facts.train_samples == 7
    assert found.facts.taken_for == "a folder of images in 2 classes, validation held out"
    write_images(tmp_path / "two" / "train", {"cat": 3, "dog": 3})
    write_images(tmp_path / "two" / "val", {"cat": 1, "dog": 2})
    found = from_path(tmp_path / "two", "--image_size=28")
    assert (found.facts.train_samples, found.facts.validation_samples, found.facts.height) == (6, 3, 28)
    (tmp_path / "one" / "cat" / "bad.jpg").write_bytes(b"no image")
    with pytest.raises(cli.UsageError, match=r"has 1 image of 11 that cannot be decoded: .*bad.jpg. Remove them, or"):
        from_path(tmp_path / "one")
    found = from_path(tmp_path / "one", "--skip_bad_samples").facts
    assert found.train_samples == 8 and found.taken_for.endswith(", without 1 image that cannot be decoded")
    (tmp_path / "one" / "eel").mkdir()
    with pytest.raises(cli.UsageError, match="has no images of the class 'eel'"):
        from_path(tmp_path / "one")


def test_an_npz_file_with_the_names_of_keras(tmp_path):
    np.savez(tmp_path / "a.npz", x_train=FLOATS, y_train=LABELS, x_test=FLOATS[:5], y_test=LABELS[:5])
    found = from_path(tmp_path / "a.npz")
    assert (found.facts.train_samples, found.facts.validation_samples, found.facts.classes) == (20, 5, 4)
    np.savez(tmp_path / "b.npz", images=FLOATS)
    with pytest.raises(cli.UsageError, match="has images; it needs x_train and y_train, as in Keras"):
        from_path(tmp_path / "b.npz")
    (tmp_path / "c.npz").write_bytes(b"PK not a zip file")
    with pytest.raises(cli.UsageError, match=r"c.npz cannot be read \(it is not what numpy.savez writes"):
        from_path(tmp_path / "c.npz")


def test_a_csv_file_with_a_column_of_labels(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("x,y,kind\n" + "".join(f"{n},{n / 2},{'red' if n % 2 else 'blue'}\n" for n in range(10)))
    found = from_path(path, "--label_column=kind")
    assert found.facts.class_names == ("blue", "red") and found.facts.inputs == TensorInfo((2,), "float32")
    assert dict(found.facts.given) == {"columns": ["x", "y"]}
    with pytest.raises(cli.UsageError, match=r"has no column 'label', only x, y or kind. Name the one to learn with"):
        from_path(path)
    with pytest.raises(cli.UsageError, match="has 'blue' in column 'kind', line 2, which is not a number"):
        from_path(path, "--label_column=x")
    path.write_text("x,label\n\n1,0\n\n2,-1\n")  # lines are those of the file, empty ones too
    with pytest.raises(cli.UsageError, match=r"has the label -1 in line 5, and class numbers begin with 0. Numbers th"):
        from_path(path)
    path.write_text("x,label\n\n1,0\n\nred,1\n")
    with pytest.raises(cli.UsageError, match="has 'red' in column 'x', line 5, which is not a number"):
        from_path(path)
    path.write_text("x,z,label\n1,2,0\n3,,1\n4,5,1\n,,0\n")
    with pytest.raises(cli.UsageError) as caught:
        from_path(path)
    assert str(caught.value) == (
        f"--dataset={path} has no value in column 'x', line 5. All columns but the label are numbers; fill in or "
        "encode others in a function that returns arrays: --dataset=FILE.py:function."
    )
    path.write_text("x,z,label\n1,red,0\n3,blue,1\n4,red,1\n")
    with pytest.raises(cli.UsageError, match=r"has 'red' in column 'z', line 2, which is not a number \(3 such lines"):
        from_path(path)
    path.write_text("x,label\n1,0.5\n2\n")
    with pytest.raises(cli.UsageError, match="has 1 value in line 3, but 2 columns"):
        from_path(path)


@pytest.mark.parametrize("labels", [[250_000, 310_000], [0.0, 1.0], [-1.0, 1.0]])
def test_numbers_of_a_table_that_are_no_classes_are_learned_as_they_are(labels, tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("x,label\n" + "".join(f"{n},{labels[n % 2]}\n" for n in range(10)))
    found = from_path(path).facts
    assert not found.is_classification and found.targets == TensorInfo((), "float32")
    assert found.taken_for == "a table of 1 column to a number, validation held out"


@pytest.mark.parametrize("name", ["nowhere.npz", "./nowhere"])
def test_a_path_that_is_not_there_is_refused(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(cli.UsageError, match=re.escape(f"--dataset={name} is n")):
        facts.find(train_flags.parse([f"--dataset={name}"]))


def test_facts_are_kept_by_the_content_of_the_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "mine.py").write_text("def build(classes): pass\n")
    cfg = train_flags.parse(["--model=mine.py:build", "--dataset=mine.py:load"])
    with pytest.raises(cli.UsageError, match="has not been planned here yet"):
        facts.find(cfg, may_load=False)
    known = dataclasses.replace(load(((FLOATS, LABELS), (FLOATS, LABELS))).facts, name="mine.py:load")
    facts.keep(cfg, known)
    assert facts.find(cfg, may_load=False) == known
    (tmp_path / "mine.py").write_text("import widths\ndef build(norm): pass\n")
    with pytest.raises(cli.UsageError, match="has not been planned here yet"):
        facts.find(cfg, may_load=False)
    (tmp_path / "widths.py").write_text("HIDDEN = 8\n")
    facts.keep(cfg, known)
    assert facts.find(cfg, may_load=False) == known
    (tmp_path / "widths.py").write_text("HIDDEN = 16\n")  # the file itself is the same
    with pytest.raises(cli.UsageError, match="has not been planned here yet"):
        facts.find(cfg, may_load=False)
