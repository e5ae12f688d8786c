from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any, List, Optional, Tuple

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from tf_ipu_dp import cli, sdk
from tf_ipu_dp.config import train_flags
from tf_ipu_dp.datasets import augment as augmentation
from tf_ipu_dp.datasets import built_in, facts, lookup, order, sources
from tf_ipu_dp.datasets.info import DATASETS, DatasetInfo
from tf_ipu_dp.datasets.memory import InMemorySplit
from tf_ipu_dp.datasets.tfrecords import TFRecordSplit
from tf_ipu_dp.planning import plan

MicroBatches = List[Tuple[Any, Any]]
TOY = DatasetInfo("toy", 70, 21, 28, 28, 1, 10, (0.25,), (0.5,))
POWERS = st.sampled_from([1, 2, 4])


@functools.lru_cache(maxsize=None)
def toy_source(facts: DatasetInfo = TOY, size: int = 28) -> sources.Source:
    """Random images whose labels are the numbers of the samples."""

    def held(samples: int, seed: int) -> InMemorySplit:
        images = np.random.RandomState(seed).randint(0, 256, (samples, size, size, facts.channels)).astype(np.uint8)
        return InMemorySplit(tf.identity(images), tf.range(samples))

    return sources.Source(facts, held(facts.train_samples, 1), held(facts.validation_samples, 2))


def plan_toy(
    facts: DatasetInfo = TOY, *, instances: int = 1, local: int = 1, accumulation: int = 1, micro: int = 4
) -> plan.RunPlan:
    words = [
        f"--ipus={instances * local}",
        f"--instances={instances}",
        f"--gradient_accumulation={accumulation}",
        f"--micro_batch_size={micro}",
    ]
    return plan.plan_run(train_flags.parse(words), facts)


def train(source: sources.Source, run: plan.RunPlan, first: int, last: int, **changes: Any) -> MicroBatches:
    options = {"instance": 0, "seed": 3, "augment": "none", "eight_bit_io": True, "prefetch": True, "dtype": "float32"}
    options.update({"first_update": first, "last_update": last, "deterministic": True, **changes})
    dataset = sources.make_training(source, run, **options)
    assert all(spec.shape.is_fully_defined() for spec in dataset.element_spec)
    return [(images.numpy(), labels.numpy()) for images, labels in dataset]


def validate(source: sources.Source, run: plan.RunPlan, **changes: Any) -> MicroBatches:
    options = {"instance": 0, "eight_bit_io": True, "prefetch": True, "dtype": "float32"}
    dataset = sources.make_validation(source, run, **{**options, **changes})
    assert all(spec.shape.is_fully_defined() for spec in dataset.element_spec)
    return [(images.numpy(), labels.numpy()) for images, labels in dataset]


def labels_of(micro_batches: MicroBatches) -> List[int]:
    return [int(label) for _, labels in micro_batches for label in labels]


def images_by_label(micro_batches: MicroBatches) -> dict[int, Any]:
    return {int(label): image for images, labels in micro_batches for image, label in zip(images, labels)}


def assert_same(left: MicroBatches, right: MicroBatches) -> None:
    assert len(left) == len(right) and left
    for (left_images, left_labels), (right_images, right_labels) in zip(left, right):
        np.testing.assert_array_equal(left_labels, right_labels)
        np.testing.assert_array_equal(left_images, right_images)


@settings(max_examples=8)
@given(instances=POWERS, local=POWERS, accumulation=st.integers(1, 3), micro=st.integers(1, 3), prefetch=st.booleans())
def test_an_epoch_has_every_sample_of_its_updates_once_over_all_instances(
    instances, local, accumulation, micro, prefetch
):
    if instances * local * accumulation * micro > TOY.train_samples:
        return
    run = plan_toy(instances=instances, local=local, accumulation=accumulation, micro=micro)
    updates = run.epochs.updates_per_epoch
    shards = [train(toy_source(), run, 0, updates, instance=i, prefetch=prefetch) for i in range(instances)]
    assert {len(shard) for shard in shards} == {updates * accumulation * local}
    seen = sorted(label for shard in shards for label in labels_of(shard))
    assert seen == sorted(order.permutation(3, 0, TOY.train_samples)[: updates * run.batch.global_batch_size].tolist())


@pytest.mark.parametrize(
    ("instances", "local", "accumulation", "augment"),
    [(2, 4, 2, "none"), (2, 4, 2, "crop_flip"), (8, 1, 2, "none"), (1, 1, 16, "crop_flip"), (1, 4, 4, "none")],
)
def test_instances_and_replicas_share_the_same_micro_batches(instances, local, accumulation, augment):
    one = plan_toy(local=8, accumulation=2)
    several = plan_toy(instances=instances, local=local, accumulation=accumulation)
    expected = train(toy_source(), one, 0, 3, augment=augment)
    shards = [train(toy_source(), several, 0, 3, instance=i, augment=augment) for i in range(instances)]
    dealt = [
        micro_batch
        for turn in range(3 * accumulation)
        for shard in shards
        for micro_batch in shard[turn * local : (turn + 1) * local]
    ]
    assert_same(dealt, expected)


def test_a_resumed_run_gets_the_samples_that_the_whole_run_would_have_got():
    run = plan_toy(local=2, accumulation=1)
    assert run.epochs.updates_per_epoch == 8
    whole = train(toy_source(), run, 0, 19, augment="crop_flip")
    for first in (1, 7, 8, 9, 16):
        assert_same(train(toy_source(), run, first, 19, augment="crop_flip"), whole[first * 2 :])


def test_epochs_have_different_orders_and_so_do_seeds():
    run = plan_toy(micro=7)
    first, second = train(toy_source(), run, 0, 10), train(toy_source(), run, 10, 20)
    assert sorted(labels_of(first)) == sorted(labels_of(second)) == list(range(70))
    assert len({tuple(labels_of(one)) for one in (first, second, train(toy_source(), run, 0, 10, seed=4))}) == 3


@pytest.mark.parametrize("augment", ["crop", "crop_flip", "imagenet"])
def test_what_happens_to_an_image_depends_on_seed_epoch_and_sample_alone(augment):
    run, other = plan_toy(micro=7), plan_toy(local=2, accumulation=5)
    first = images_by_label(train(toy_source(), run, 0, 10, augment=augment))
    elsewhere = images_by_label(train(toy_source(), other, 0, 1, augment=augment))
    assert len(elsewhere) == 40
    for sample, image in elsewhere.items():
        np.testing.assert_array_equal(image, first[sample])
    for later in (
        images_by_label(train(toy_source(), run, 10, 20, augment=augment)),
        images_by_label(train(toy_source(), run, 0, 10, augment=augment, seed=4)),
    ):
        assert sum(not np.array_equal(later[sample], first[sample]) for sample in range(70)) > 60


@pytest.mark.parametrize(("augment", "mirrors"), [("crop", [False]), ("crop_flip", [False, True])])
def test_crops_are_shifts_by_up_to_four_pixels_into_black_and_flips_mirror_them(augment, mirrors):
    originals = toy_source().train.images.numpy()
    seen = set()
    for epoch in range(6):
        run = plan_toy(micro=7)
        changed = images_by_label(train(toy_source(), run, 10 * epoch, 10 * epoch + 10, augment=augment))
        for sample, image in changed.items():
            padded = np.pad(originals[sample], [(4, 4), (4, 4), (0, 0)])
            places = [
                (top, left, mirror)
                for top in range(9)
                for left in range(9)
                for mirror in mirrors
                if np.array_equal(image[:, :: -1 if mirror else 1], padded[top : top + 28, left : left + 28])
            ]
            assert len(places) == 1
            seen.update(places)
    assert {top for top, _, _ in seen} == {left for _, left, _ in seen} == set(range(9))
    assert {mirror for _, _, mirror in seen} == set(mirrors)


def test_a_random_part_of_an_image_keeps_its_brightness_and_sometimes_mirrors_it():
    facts = dataclasses.replace(TOY, height=32, width=32)
    ramp = np.broadcast_to(np.arange(28, dtype=np.uint8)[None, None, :, None] * 9, (70, 28, 28, 1))
    held = InMemorySplit(tf.identity(ramp), tf.range(70))
    changed = train(sources.Source(facts, held, held), plan_toy(facts, micro=7), 0, 10, augment="imagenet")
    assert changed[0][0].shape == (7, 32, 32, 1)
    slopes = [int(image[0, -1, 0]) - int(image[0, 0, 0]) for images, _ in changed for image in images]
    assert 20 < sum(slope > 0 for slope in slopes) < 50 and len(set(map(abs, slopes))) > 10
    assert max(map(abs, slopes)) <= 27 * 9
    for images, _ in changed:
        np.testing.assert_array_equal(images, np.broadcast_to(images[:, :1], images.shape))


def test_every_augmentation_of_the_flags_is_implemented():
    assert {"auto", *augmentation.RANDOM_NUMBERS} == set(train_flags.AUGMENTATIONS)
    assert {facts.augment for facts in DATASETS.values()} <= set(augmentation.RANDOM_NUMBERS)


def test_images_are_normalised_by_channel_on_the_host():
    facts = DatasetInfo("toy", 16, 4, 28, 28, 3, 10, (0.1, 0.2, 0.3), (0.5, 0.25, 0.125))
    source, run = toy_source(facts), plan_toy(facts)
    raw, single, half = (
        train(source, run, 0, 4, eight_bit_io=eight_bit_io, dtype=dtype)
        for eight_bit_io, dtype in ((True, "float16"), (False, "float32"), (False, "float16"))
    )
    assert [raw[0][0].dtype, single[0][0].dtype, half[0][0].dtype] == [np.uint8, np.float32, np.float16]
    assert raw[0][1].dtype == np.int32
    for (pixels, _), (numbers, _), (short, _) in zip(raw, single, half):
        expected = (pixels / 255.0 - facts.mean) / facts.deviation
        np.testing.assert_allclose(numbers, expected, rtol=0, atol=2e-6)
        np.testing.assert_allclose(short, expected, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("augment", ["none", "crop_flip", "imagenet"])
def test_eight_bit_images_are_those_that_are_normalised_otherwise(augment):
    facts = dataclasses.replace(TOY, height=36, width=36)
    source, run = toy_source(facts), plan_toy(facts)
    raw = train(source, run, 0, 4, augment=augment)
    numbers = train(source, run, 0, 4, augment=augment, eight_bit_io=False)
    for (pixels, _), (normalised, _) in zip(raw, numbers):
        np.testing.assert_allclose(normalised, (pixels / 255.0 - 0.25) / 0.5, rtol=0, atol=2e-6)


def test_images_are_brought_to_the_size_of_the_run():
    facts = dataclasses.replace(TOY, height=56, width=56)
    source = toy_source(facts)
    images = images_by_label(train(source, plan_toy(facts), 0, 4))
    originals = source.train.images.numpy()
    for sample, image in images.items():
        assert image.shape == (56, 56, 1)
        whole = tf.image.resize(originals[sample], [56, 56], method="bilinear").numpy()
        np.testing.assert_allclose(image, whole, rtol=0, atol=0.51)
    assert validate(source, plan_toy(facts))[0][0].shape == (4, 56, 56, 1)


def test_loading_in_the_background_changes_nothing():
    run = plan_toy(local=2)
    quiet = train(toy_source(), run, 0, 11, augment="crop_flip", prefetch=False)
    assert_same(train(toy_source(), run, 0, 11, augment="crop_flip", prefetch=True), quiet)
    assert_same(validate(toy_source(), run, prefetch=True), validate(toy_source(), run, prefetch=False))


@settings(max_examples=8)
@given(instances=POWERS, local=POWERS, micro=st.integers(1, 4))
def test_validation_has_every_sample_once_in_order_and_then_padding(instances, local, micro):
    run = plan_toy(instances=instances, local=local, micro=micro)
    originals = toy_source().validation.images.numpy()
    seen = []
    for instance in range(instances):
        micro_batches = validate(toy_source(), run, instance=instance)
        assert len(micro_batches) * micro == run.validation.slots_per_instance
        images, labels = (np.concatenate(parts) for parts in zip(*micro_batches))
        expected = sources.targets_of_validation(toy_source(), run, instance)
        assert expected.tolist() == list(run.validation.shard(instance)) and expected.dtype == np.int32
        np.testing.assert_array_equal(labels[: len(expected)], expected)
        np.testing.assert_array_equal(images[: len(expected)], originals[expected])
        assert not images[len(expected) :].any() and not labels[len(expected) :].any()
        seen += expected.tolist()
    assert seen == list(range(TOY.validation_samples))


def resident_mb() -> float:
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * 4096 / 2**20


def test_the_images_are_held_once_however_many_pipelines_read_them():
    facts = DatasetInfo("toy", 2048, 16, 128, 128, 3, 10, (0.5,) * 3, (0.5,) * 3)
    images = tf.zeros([2048, 128, 128, 3], tf.uint8) + tf.constant(1, tf.uint8)
    source = sources.Source(facts, InMemorySplit(images, tf.range(2048)), toy_source().validation)
    run = plan_toy(facts, micro=8)
    before = resident_mb()
    iterators = []
    for seed in range(3):
        dataset = sources.make_training(
            source, run, instance=0, first_update=0, last_update=256, seed=seed, augment="none",
            eight_bit_io=True, prefetch=False, deterministic=True, dtype="float32",
        )  # fmt: skip
        iterators.append(iter(dataset))
        next(iterators[-1])
    assert resident_mb() - before < 40  # the set has 96 MB


def test_the_shipped_set_is_fashion_mnist_in_small():
    source = sources.open_source(DATASETS["fashion_mini"], data_dir=None, seed=1)
    for held, samples in ((source.train, 8192), (source.validation, 2048)):
        assert held.images.shape == (samples, 28, 28, 1) and held.images.dtype == tf.uint8
        share = np.bincount(held.labels.numpy(), minlength=10) / samples
        assert len(share) == 10 and share.min() > 0.09 and share.max() < 0.11
    facts = source.facts
    pixels = source.train.images.numpy() / 255
    assert abs(pixels.mean() - facts.mean[0]) < 0.002 and abs(pixels.std() - facts.deviation[0]) < 0.002
    # A linear model shows that images and labels belong together.
    flat = pixels.reshape(8192, -1)
    answers = np.linalg.lstsq(flat[:4096], np.eye(10)[source.train.labels.numpy()[:4096]], rcond=None)[0]
    test = source.validation.images.numpy().reshape(2048, -1) / 255
    assert (np.argmax(test @ answers, axis=1) == source.validation.labels.numpy()).mean() > 0.7


def test_the_shipped_set_comes_with_its_licence():
    text = (Path(sources.__file__).parent / "fashion_mini.txt").read_text(encoding="utf-8")
    assert "Copyright (c) 2017 Zalando SE" in text and "The MIT License" in text


def test_synthetic_images_can_be_learned_and_come_from_the_seed():
    facts = dataclasses.replace(DATASETS["synthetic"], train_samples=500, validation_samples=200)
    source, again, other = (sources.open_source(facts, data_dir=None, seed=seed) for seed in (1, 1, 2))
    images, labels = source.train.images.numpy(), source.train.labels.numpy()
    np.testing.assert_array_equal(images, again.train.images.numpy())
    assert not np.array_equal(images, other.train.images.numpy())
    means = np.stack([images[labels == label].mean(axis=0) for label in range(10)])
    test = source.validation.images.numpy().astype(np.float32)
    distances = ((test[:, None] - means[None]) ** 2).sum(axis=(2, 3, 4))
    assert (distances.argmin(axis=1) == source.validation.labels.numpy()).mean() > 0.95
    assert not np.array_equal(test[:200], images[:200])


def test_large_synthetic_images_repeat_rather_than_fill_the_memory(monkeypatch):
    monkeypatch.setattr(built_in, "_MAX_SYNTHETIC_BYTES", 21 * 32 * 32 * 3)
    facts = dataclasses.replace(DATASETS["synthetic"], train_samples=64, validation_samples=30)
    source = sources.open_source(facts, data_dir=None, seed=1)
    assert source.train.images.shape[0] == 20
    assert sorted(labels_of(train(source, plan_toy(facts), 0, 16))) == sorted(i % 10 for i in range(64))
    run = plan_toy(facts)
    assert sources.targets_of_validation(source, run, 0).tolist() == [i % 10 for i in range(30)]


def test_the_benchmark_of_the_sdk_gives_the_speed_of_a_pipeline():
    run = plan_toy(micro=7)
    dataset = sources.make_training(
        toy_source(), run, instance=0, first_update=0, last_update=10, seed=1, augment="none",
        eight_bit_io=False, prefetch=True, deterministic=True, dtype="float32",
    )  # fmt: skip
    speed = sources.measure(dataset, sdk.load("emulator").ipu, elements=40, samples_per_element=7)
    assert speed.samples == 280 and speed.samples_per_s == pytest.approx(280 / speed.elapsed_s)
    assert speed.bytes_per_s == pytest.approx(speed.samples_per_s * (28 * 28 * 4 + 4))


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder in which tensorflow-datasets has prepared two sets of 45 and 14 pictures, in 4 files and 2."""
    tfds = pytest.importorskip("tensorflow_datasets")

    class Pictures(tfds.core.GeneratorBasedBuilder):  # type: ignore[misc, name-defined]
        VERSION = tfds.core.Version("1.0.0")
        SHAPE: Tuple[Optional[int], ...] = (30, 30, 3)
        FORMAT = "png"

        def _info(self) -> Any:
            columns = {
                "id": tfds.features.Text(),
                "image": tfds.features.Image(shape=self.SHAPE, encoding_format=self.FORMAT),
                "label": tfds.features.ClassLabel(num_classes=50),
            }
            return tfds.core.DatasetInfo(builder=self, features=tfds.features.FeaturesDict(columns))

        def _split_generators(self, dl_manager: Any) -> Any:
            return {"train": self._generate_examples(45), "validation": self._generate_examples(14)}

        def _generate_examples(self, samples: int = 0) -> Any:
            for i in range(samples):
                height, width = self.SHAPE[0] or 40 + i, self.SHAPE[1] or 90 - i
                yield i, {"id": str(i), "image": picture(i, height, width), "label": i}

    class TinyFixed(Pictures):
        pass

    class TinyVaried(Pictures):
        SHAPE, FORMAT = (None, None, 3), "jpeg"

    folder = tmp_path_factory.mktemp("data")
    for kind in (TinyFixed, TinyVaried):
        settings = tfds.download.DownloadConfig(num_shards=4)
        kind(data_dir=str(folder)).download_and_prepare(download_config=settings)
    return str(folder)


def picture(label: int, height: int, width: int) -> Any:
    """Red says which it is, green rises from left to right, blue from top to bottom."""
    image = np.empty([height, width, 3], np.uint8)
    image[..., 0] = 5 * label
    image[..., 1] = np.linspace(0, 240, width)
    image[..., 2] = np.linspace(0, 240, height)[:, None]
    return image


def open_prepared(name: str, data_dir: str, image_size: Optional[int] = None) -> sources.Source:
    return sources.open_source(lookup.find(name, data_dir, image_size), data_dir=data_dir, seed=1)


def test_a_small_prepared_set_is_loaded_into_memory(prepared):
    source = open_prepared("tiny_fixed", prepared)
    assert source.facts.classes == 50 and not source.facts.streamed
    for held, samples in ((source.train, 45), (source.validation, 14)):
        assert sorted(held.labels.numpy()) == list(range(samples))
        for image, label in zip(held.images.numpy(), held.labels.numpy()):
            np.testing.assert_array_equal(image, picture(label, 30, 30))


@pytest.mark.parametrize("place", ["tiny_fixed", "tiny_fixed/1.0.0"])
def test_a_prepared_set_is_taken_by_its_path_without_a_data_folder(prepared, place, tmp_path):
    cfg = train_flags.parse([f"--dataset={prepared}/{place}", f"--data_dir={tmp_path}"])
    assert not facts.is_own_path(cfg)
    found = facts.find(cfg)
    assert (found.train_samples, found.validation_samples, found.classes) == (45, 14, 50)
    assert found.taken_for == "a set of tensorflow-datasets"
    source = sources.open_source(found, data_dir=cfg.data_dir, seed=1)
    assert sorted(source.train.labels.numpy()) == list(range(45))


def test_a_streamed_set_gives_every_instance_its_own_samples(prepared):
    source = open_prepared("tiny_varied", prepared, 32)
    assert source.facts.streamed and isinstance(source.train, TFRecordSplit)
    run = plan_toy(source.facts, instances=4, local=1, micro=2, accumulation=1)
    updates = run.epochs.updates_per_epoch
    assert updates == 5
    shards = [train(source, run, 0, updates, instance=i) for i in range(4)]
    seen = [label for shard in shards for label in labels_of(shard)]
    assert len(seen) == len(set(seen)) == 40
    for shard in shards:
        for images, labels in shard:
            assert images.shape == (2, 32, 32, 3) and images.dtype == np.uint8
            np.testing.assert_allclose(images[..., 0].mean(axis=(1, 2)), 5.0 * labels, rtol=0, atol=6)


def test_a_streamed_set_has_another_order_in_every_epoch_and_resumes_where_it_stopped(prepared):
    source = open_prepared("tiny_varied", prepared, 32)
    run = plan_toy(source.facts, micro=5)
    whole = train(source, run, 0, 18, augment="imagenet")
    epochs = [labels_of(whole[:9]), labels_of(whole[9:])]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(45)) and epochs[0] != epochs[1]
    for first in (4, 9, 12):
        assert_same(train(source, run, first, 18, augment="imagenet"), whole[first:])


def test_the_random_part_of_a_streamed_image_does_not_depend_on_the_instances(prepared):
    source = open_prepared("tiny_varied", prepared, 32)
    one, two = plan_toy(source.facts, micro=5), plan_toy(source.facts, instances=2, micro=5)
    alone = images_by_label(train(source, one, 0, 9, augment="imagenet"))
    shared = images_by_label(
        [pair for i in (0, 1) for pair in train(source, two, 0, 4, instance=i, augment="imagenet")]
    )
    assert len(shared) == 40
    for sample, image in shared.items():
        np.testing.assert_array_equal(image, alone[sample])
    slopes = [int(image[16, -1, 1]) - int(image[16, 0, 1]) for image in alone.values()]
    assert 10 < sum(slope < 0 for slope in slopes) < 35 and len({abs(slope) // 10 for slope in slopes}) > 5


@pytest.mark.parametrize("name", ["tiny_fixed", "tiny_varied"])
@pytest.mark.parametrize("augment", ["crop", "crop_flip", "imagenet"])
def test_every_augmentation_works_on_streamed_sets_too(name, augment, prepared):
    facts = dataclasses.replace(lookup.find(name, prepared, 32), streamed=True)
    source = sources.open_source(facts, data_dir=prepared, seed=1)
    for images, labels in train(source, plan_toy(facts, micro=5), 0, 9, augment=augment):
        assert images.shape == (5, 32, 32, 3)
        np.testing.assert_allclose(images[:, 16, 16, 0], 5.0 * labels, rtol=0, atol=6)


def test_validation_of_a_streamed_set_shows_the_middle_of_every_image_once(prepared):
    source = open_prepared("tiny_varied", prepared, 32)
    run = plan_toy(source.facts, instances=4, local=1, micro=3)
    seen = []
    for instance in range(4):
        micro_batches = validate(source, run, instance=instance)
        assert len(micro_batches) * 3 == run.validation.slots_per_instance
        labels = sources.targets_of_validation(source, run, instance)
        images = np.concatenate([images for images, _ in micro_batches])
        assert labels_of(micro_batches)[: len(labels)] == labels.tolist() and labels.dtype == np.int32
        assert not images[len(labels) :].any()
        middle = images[: len(labels), 15:17, 15:17].mean(axis=(1, 2))
        np.testing.assert_allclose(middle[:, 0], 5.0 * labels, rtol=0, atol=6)
        np.testing.assert_allclose(middle[:, 1:], 120, rtol=0, atol=8)
        seen += labels.tolist()
    assert sorted(seen) == list(range(14))


def test_images_of_a_streamed_set_are_normalised_like_others(prepared):
    source = open_prepared("tiny_varied", prepared, 32)
    run = plan_toy(source.facts, micro=5)
    for make in (functools.partial(train, first=0, last=9), validate):
        raw = images_by_label(make(source, run))
        normalised = images_by_label(make(source, run, eight_bit_io=False, dtype="float16"))
        for label, image in normalised.items():
            expected = (raw[label] / 255.0 - source.facts.mean) / source.facts.deviation
            np.testing.assert_allclose(image, expected, rtol=2e-3, atol=2e-3)
            assert image.dtype == np.float16


def test_prepared_data_that_changed_after_planning_are_refused(prepared):
    facts = dataclasses.replace(lookup.find("tiny_fixed", prepared, None), train_samples=44)
    with pytest.raises(cli.UsageError, match=r"has other training images.*Start the run again\."):
        sources.open_source(facts, data_dir=prepared, seed=1)


@pytest.mark.parametrize("name", ["mnist", "imagenet2012"])
def test_a_set_that_cannot_be_downloaded_is_refused(name, tmp_path, monkeypatch):
    for variable in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
        monkeypatch.setenv(variable, "http://127.0.0.1:9")
    with pytest.raises(
        cli.UsageError, match=rf"--dataset={name} was not found in .* Prepare it with python -c"
    ) as caught:
        sources.open_source(DATASETS[name], data_dir=str(tmp_path), seed=1)
    assert len(caught.value.sentences) == 1
    assert list(tmp_path.iterdir()) == []
