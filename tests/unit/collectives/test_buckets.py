"""Buckets against what the emulator packs, and properties of the fusion."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tf_ipu_dp import cli
from tf_ipu_dp.collectives import buckets, size
from tf_ipu_dp.planning import architectures, gradients
from tf_ipu_dp.planning.gradients import Gradient

GRADIENTS = st.lists(st.integers(1, 300_000), min_size=1, max_size=40).map(
    lambda sizes: [Gradient(f"v{number}", elements) for number, elements in enumerate(sizes)]
)


@given(GRADIENTS, st.sampled_from([2, 4, 8]), st.integers(1, 2_000_000))
def test_every_gradient_is_in_one_bucket_and_no_bucket_is_larger_than_it_must_be(found, item, threshold):
    made = buckets.fuse(buckets.sent_tensors(found, item), threshold)
    names = [name for bucket in made for name in bucket.variables]
    assert sorted(names) == sorted(each.variable for each in found)
    elements = {each.variable: each.elements for each in found}
    for bucket in made:
        assert bucket.bytes == item * sum(elements[name] for name in bucket.variables)
        alone = sum(elements[name] >= buckets.SENT_ALONE for name in bucket.variables)
        is_one_tensor = alone + (alone < len(bucket.variables)) == 1
        assert bucket.bytes <= threshold or is_one_tensor


def test_the_tensors_are_those_that_the_emulator_sends():
    import tensorflow as tf

    from tf_ipu_dp.emulator.runtime.gradient_reduction import Packing

    architecture = architectures.describe("resnet18", height=32, width=32, channels=3, classes=10, norm="batch")
    found = gradients.gradients(architecture)
    packed = Packing([tf.TensorSpec([each.elements], tf.float32) for each in found]).zeros()
    assert [tensor.bytes for tensor in buckets.sent_tensors(found, 4)] == [int(tf.size(each)) * 4 for each in packed]


def _run(capsys, *words):
    assert size.main(words) == 0
    return capsys.readouterr().out


def test_a_job_s_sizes_are_shown(capsys):
    text = _run(capsys, "--model=mlp", "--ipus=4", "--instances=4", "--epochs=2")
    assert "hidden1_dense/kernel" in text and "in 1 bucket." in text
    assert "updates per epoch x 2 epochs" in text


def test_a_threshold_divides_the_buckets(capsys):
    text = _run(capsys, "--model=resnet50", "--ipus=2", "--fusion_threshold=32MiB")
    assert "in 3 buckets" in text


@pytest.mark.parametrize(("text", "words"), [("abc", "'abc' is not a size"), ("-1", "is not a size"), ("4kib", "4KiB")])
def test_a_threshold_that_is_no_size_is_refused(text, words):
    with pytest.raises(cli.UsageError, match=words):
        size.main([f"--fusion_threshold={text}"])


def test_the_threshold_of_the_environment_is_used_and_named(monkeypatch, capsys):
    monkeypatch.setenv("HOROVOD_FUSION_THRESHOLD", str(32 << 20))
    assert "in 3 buckets" in _run(capsys, "--model=resnet50", "--ipus=2")
    monkeypatch.setenv("HOROVOD_FUSION_THRESHOLD", "many")
    with pytest.raises(cli.UsageError, match="HOROVOD_FUSION_THRESHOLD=many"):
        size.main(["--model=mlp"])
