from __future__ import annotations

import pytest
from scaling_stand_ins import PARTS

from tf_ipu_dp import cli
from tf_ipu_dp.scaling import study_flags
from tf_ipu_dp.scaling.parts import Extent


def parse(*words):
    return study_flags.parse(["--model=mlp", *words], PARTS)


def test_a_study_has_defaults_for_all_but_the_global_batch_of_strong_scaling():
    options = parse()
    assert (options.request.mode, options.request.sizes, options.request.axis) == ("weak", (1, 2, 4), "instances")
    assert (options.repeats, options.seconds, options.updates, options.resume) == (3, 8.0, None, True)
    assert parse("--mode=batch").request.axis == "samples"
    assert parse("--mode=compare", "--unit=instances").request.axis == "replicas"


def test_emulated_hosts_are_built_as_fast_as_they_are_named():
    fabric = parse("--fabric=r4").fabric
    assert (fabric.name, fabric.hosts, fabric.dilation) == ("r4", 4, 1.0)
    assert parse("--fabric=r4", "--fabric_hosts=2").request.hosts == 2


def test_sizes_and_fabrics_to_extrapolate_to():
    assert parse("--predict=16..64", "--predict_on=pod64, pod256").extent == Extent((16, 32, 64), ("pod64", "pod256"))
    assert parse("--predict=16").extent == Extent((16,))
    assert parse("--predict=16", "--compute_ms=1.5").extent == Extent((16,), (), 1.5)
    assert parse().extent is None
    with pytest.raises(
        cli.UsageError, match=r"^--predict_on=pod16,pod65: pod65 is not a topology\. Did you mean pod64\?"
    ):
        parse("--predict=16", "--predict_on=pod16,pod65")


def test_extrapolation_without_our_engine_is_refused_before_anything_is_measured():
    with pytest.raises(cli.UsageError) as error:
        parse("--predict=16", "--engines=ddp,keras")
    assert str(error.value) == (
        "--predict=16 extrapolates tf_ipu_dp, and --engines=ddp,keras is without it. Use "
        "--engines=tf_ipu_dp,ddp,keras, or leave --predict out."
    )


@pytest.mark.parametrize(
    ("word", "sentence"),
    [
        ("--run_dir=runs/a", "--run_dir=runs/a is of one run. Use --study_dir=runs/a."),
        ("--evaluate", "--evaluate has no place in a study, which trains. Leave it out."),
        ("--hosts=4", "--hosts=4 says how many, but not which. Give names, like --hosts=a,b."),
        (
            "--dilation=4",
            "--dilation=4 has no place in a study: it would slow the network and not the training, so that a study "
            "builds all links as they are. Leave it out.",
        ),
        ("--predict_on=pod16", "--predict_on=pod16 needs sizes. Add --predict=16..65536."),
        ("--compute_ms=2", "--compute_ms=2 needs sizes to extrapolate to. Add --predict=16..65536."),
        ("--compute_ms=-1", "--compute_ms=-1 is not a time. Give that of one micro batch on the device."),
        (
            "--target_accuracy=0.9",
            "--target_accuracy=0.9 would be 0.9 %: accuracies are in per cent. Write --target_accuracy=90.",
        ),
        ("--engines=", "--engines=: an empty name is not an engine. "),
        (
            "--sizes=",
            "--sizes= is not a list of sizes from 1 to 1,048,576. Write 1,2,4 or 16..512, which doubles.",
        ),
        ("--engines=tf_ipu_dp,torch", "--engines=tf_ipu_dp,torch: torch is not an engine. "),
    ],
)
def test_a_flag_that_has_no_place_is_refused_with_what_to_do(word, sentence):
    with pytest.raises(cli.UsageError) as error:
        parse(word)
    assert str(error.value).startswith(sentence)


def test_an_accuracy_is_typed_in_per_cent_and_kept_as_a_share():
    assert parse("--target_accuracy=87.5").target_accuracy == 0.875 and parse().target_accuracy is None


def test_real_and_emulated_hosts_exclude_each_other():
    with pytest.raises(cli.UsageError, match="--fabric makes hosts of its own"):
        parse("--fabric=r4", "--hosts=a,b")


def test_the_help_has_examples_and_fits_the_terminal():
    text = study_flags.render_help()
    assert "python -m tf_ipu_dp.scaling report runs/batch" in text and "--dilation" not in text
    assert max(map(len, text.splitlines())) <= 120
