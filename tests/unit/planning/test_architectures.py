"""The models as blocks: their sizes, how they are cut, and what is said of a cut that cannot be."""

from __future__ import annotations

import itertools
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tf_ipu_dp.planning import architectures
from tf_ipu_dp.planning.architectures import Architecture, Block
from tf_ipu_dp.planning.layers import INPUT


def describe(name, size=32, channels=3, classes=10, norm="batch"):
    return architectures.describe(name, height=size, width=size, channels=channels, classes=classes, norm=norm)


def with_work(work):
    blocks = tuple(Block(f"block{place}", (f"layer{place}",), macs, 0) for place, macs in enumerate(work))
    return Architecture("drawn", 32, 32, 3, 10, "batch", blocks)


def work_of(architecture, splits):
    return [sum(block.macs for block in stage) for stage in architectures.cut(architecture, splits)]


def names(stages):
    return [[block.name for block in stage] for stage in stages]


@pytest.mark.parametrize(
    ("name", "parameters", "moving_statistics"),
    [
        ("resnet18", 11_689_512, 9_600),
        ("resnet34", 21_797_672, 17_024),
        ("resnet50", 25_583_592, 53_120),
        ("resnet101", 44_601_832, 105_344),
        ("resnet152", 60_268_520, 151_424),
    ],
)
def test_imagenet_resnets_have_the_published_number_of_parameters(name, parameters, moving_statistics):
    batch = describe(name, 224, classes=1000)
    group = describe(name, 224, classes=1000, norm="group")
    assert (batch.parameters, group.parameters) == (parameters + moving_statistics, parameters)


def test_the_mlp_has_784_256_128_64_and_10_units_for_images_of_28x28_and_10_classes():
    mlp = describe("mlp", 28, 1)
    units = [layer.units for layer in architectures.layers(mlp) if layer.kind == "dense"]
    sizes = [784, *units]
    assert sizes == [784, 256, 128, 64, 10]
    assert mlp.parameters == sum(inputs * outputs + outputs for inputs, outputs in zip(sizes, units)) == 242_762
    assert 4 * mlp.parameters == 971_048  # bytes of its gradients in 32 bits


@pytest.mark.parametrize(
    ("name", "millions"),
    [("resnet18", 1814), ("resnet34", 3664), ("resnet50", 3858), ("resnet101", 7570), ("resnet152", 11282)],
)
def test_imagenet_resnets_have_the_published_work(name, millions):
    assert round(describe(name, 224, classes=1000).macs / 1e6) == pytest.approx(millions, abs=5)


@pytest.mark.parametrize("depth", [8, 20, 32, 44, 56])
def test_the_depth_in_a_cifar_resnets_name_counts_its_layers_with_weights_but_projections(depth):
    drawn = architectures.layers(describe(f"resnet{depth}"))
    weighty = [layer for layer in drawn if layer.kind in ("conv", "dense") and "_0_" not in layer.name]
    projections = [layer for layer in drawn if layer.kind == "conv" and layer.kernel == 1]
    assert (len(weighty), len(projections)) == (depth, 2)


@pytest.mark.parametrize("norm", architectures.NORMS)
@pytest.mark.parametrize("name", architectures.MODELS)
def test_one_tensor_crosses_from_each_block_to_the_next(name, norm):
    architecture = describe(name, 28, 1, norm=norm)
    drawn = {layer.name: layer for layer in architectures.layers(architecture)}
    assert list(drawn) == [layer for block in architecture.blocks for layer in block.layers]
    entry = INPUT
    for block in architecture.blocks:
        taken = {source for layer in block.layers for source in drawn[layer].inputs} - set(block.layers)
        assert taken == {entry}
        entry = block.layers[-1]
    assert entry == architectures.HEAD


def test_images_need_not_be_square():
    tall = architectures.describe("resnet8", height=64, width=32, channels=3, classes=10, norm="batch")
    head = tall.blocks[-1].macs
    assert tall.parameters == describe("resnet8").parameters
    assert tall.macs - head == 2 * (describe("resnet8").macs - head)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"name": "vgg"}, f"'vgg' is not a model; use one of {', '.join(architectures.MODELS)}."),
        ({"norm": "layer"}, "'layer' is not a norm; use one of batch, group."),
        ({"width": 27}, "resnet8 takes images from 28x28 up, not 28x27."),
        ({"channels": 0}, "resnet8 cannot have 0 channels and 10 classes: both are at least 1."),
        ({"classes": 0}, "resnet8 cannot have 1 channels and 0 classes: both are at least 1."),
    ],
)
def test_a_model_that_there_cannot_be_is_refused(changed, said):
    asked = {"name": "resnet8", "height": 28, "width": 28, "channels": 1, "classes": 10, "norm": "batch", **changed}
    with pytest.raises(ValueError, match=f"^{said}$"):
        architectures.describe(asked.pop("name"), **asked)


@given(work=st.lists(st.integers(0, 12), min_size=1, max_size=8), data=st.data())
def test_no_other_cut_has_a_smaller_largest_stage_nor_of_those_more_even_stages(work, data):
    stages = data.draw(st.integers(1, len(work)))
    architecture = with_work(work)

    def rank(splits):
        sums = work_of(architecture, splits)
        return max(sums), sum(total * total for total in sums)

    block_names = [block.name for block in architecture.blocks]
    chosen = architectures.balance(architecture, stages)
    assert len(chosen) == stages - 1
    assert rank(chosen) == min(map(rank, itertools.combinations(block_names[1:], stages - 1)))


def test_of_equally_long_largest_stages_the_rest_is_shared_evenly():
    assert architectures.balance(with_work([9, 1, 1, 1, 1]), 3) == ("block1", "block3")


@pytest.mark.parametrize("name", architectures.MODELS)
def test_every_model_can_be_cut_into_four_stages(name):
    architecture = describe(name)
    stages = architectures.cut(architecture, architectures.balance(architecture, 4))
    assert len(stages) == 4
    assert all(stages)
    assert tuple(itertools.chain.from_iterable(stages)) == architecture.blocks


@pytest.mark.parametrize("stages", [2, 4, 8])
def test_the_stages_of_a_deep_resnet_have_about_the_same_work(stages):
    architecture = describe("resnet152", 224, classes=1000)
    sums = work_of(architecture, architectures.balance(architecture, stages))
    assert max(sums) < 1.1 * architecture.macs / stages


@pytest.mark.parametrize("stages", [0, 5])
def test_more_stages_than_blocks_are_refused(stages):
    with pytest.raises(ValueError, match=f"^mlp cannot be cut into {stages} stages: it has 4 blocks, .*$"):
        architectures.balance(describe("mlp"), stages)


def test_a_model_is_cut_where_the_blocks_are_named():
    resnet8 = describe("resnet8")
    assert names(architectures.cut(resnet8, ["conv3_block1", "head"])) == [
        ["stem", "conv2_block1"],
        ["conv3_block1", "conv4_block1"],
        ["head"],
    ]
    assert architectures.cut(resnet8, []) == (resnet8.blocks,)


@pytest.mark.parametrize(
    ("splits", "said"),
    [
        (["conv3_block2"], "resnet8 has no block 'conv3_block2': the nearest are conv3_block1, .*"),
        (["xyz"], "resnet8 has no block 'xyz': there are conv2_block1, conv3_block1, conv4_block1, head."),
        (
            ["stem"],
            "stem is the first block of resnet8, with which stage 0 begins: "
            "a further stage begins with one of conv2_block1, conv3_block1, conv4_block1, head.",
        ),
        (["head", "head"], "Two stages of resnet8 cannot both begin with head."),
        (["conv2_block1", "head", "conv2_block1"], "Two stages of resnet8 cannot both begin with conv2_block1."),
        (
            ["head", "conv3_block1"],
            "conv3_block1 comes before head in resnet8: the order is conv3_block1, head.",
        ),
    ],
)
def test_a_cut_that_cannot_be_names_those_that_can(splits, said):
    with pytest.raises(ValueError, match=f"^{said}$"):
        architectures.cut(describe("resnet8"), splits)


def test_describing_a_model_needs_neither_tensorflow_nor_numpy():
    code = (
        "import sys; from tf_ipu_dp.planning import architectures; "
        "architectures.describe('resnet50', height=224, width=224, channels=3, classes=10, norm='group'); "
        "sys.exit('tensorflow' in sys.modules or 'numpy' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("name", architectures.MODELS)
def test_norm_matters_to_every_model_that_has_a_norm_layer(name):
    batch, group = describe(name), describe(name, norm="group")
    assert architectures.has_norm(batch) is architectures.has_norm(group) is (batch.parameters != group.parameters)
