"""TF_POPLAR_FLAGS: what the SDK takes is taken, everything else is named."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tf_ipu_dp.emulator.runtime import poplar_flags

WORDS = st.text(st.characters(blacklist_categories=("Cs", "Z", "Cc")), max_size=30)


def read(text):
    return poplar_flags.read({"TF_POPLAR_FLAGS": text})


def test_flags_by_name_and_the_last_counts():
    assert poplar_flags.read({}) == {} == read("   ")
    text = "--use_ipu_model --executable_cache_path=/a=b --max_infeed_threads=2 --use_ipu_model=0 --allow_nans=True"
    assert read(text) == {
        "use_ipu_model": "false", "executable_cache_path": "/a=b", "max_infeed_threads": "2", "allow_nans": "true",
    }  # fmt: skip
    synthetic = "--synthetic_data_categories=infeed,seed --synthetic_data_initializer=-3"
    assert read(synthetic)["synthetic_data_categories"] == "infeed,seed"


@pytest.mark.parametrize(
    ("text", "advice"),
    [
        ("--use_ipu_modle", "the nearest is --use_ipu_model"),
        ("use_ipu_model", "the nearest is --use_ipu_model"),
        ("--save_vertex_graph=1", "unknown flag"),
        ("--zzz", "they are --allow_nans"),
        ("--max_infeed_threads=two", "a whole number"),
        ("--max_infeed_threads", "a whole number"),
        ("--use_on_demand=maybe", "true or false"),
        ("--on_demand_device_poll_time=99", "100 ms or more"),
        ("--show_progress_bar=on", "true, false, auto"),
        ("--executable_cache_path=", "a path"),
        ("--synthetic_data_categories=infeed,weights", "hostembedding"),
        ("--use_synthetic_data --synthetic_data_initializer=zeros", "random, uniform, normal"),
        ("--synthetic_data_initializer=random", "without --use_synthetic_data"),
    ],
)
def test_what_would_end_the_program_is_named(text, advice):
    with pytest.raises(poplar_flags.FlagError) as caught:
        read(text)
    assert advice in str(caught.value) and "\n" not in str(caught.value)


@given(st.lists(WORDS, max_size=4))
def test_whatever_stands_there_is_read_or_refused(words):
    try:
        flags = read(" ".join(words))
    except poplar_flags.FlagError as error:
        assert str(error).startswith("TF_POPLAR_FLAGS has ")
    else:
        assert len(flags) <= len(words)
