from __future__ import annotations

import pytest

from tf_ipu_dp import cli
from tf_ipu_dp.collectives import calibrate, validate
from tf_ipu_dp.collectives.validate import DELAY, LAYOUT, LINK, LOSS, R4, Row


def _row(group, measured, predicted, **kwargs):
    return Row(group, "a case", 4, 971_048, 20, measured, predicted, **kwargs)


@pytest.mark.parametrize(
    ("rows", "is_met"),
    [
        ([_row(LINK, 0.100, 0.104), _row(LINK, 0.100, 0.094)], True),
        ([_row(LINK, 0.100, 0.111), _row(LINK, 0.1, 0.1), _row(LINK, 0.1, 0.1)], False),  # one is above 10 %
        ([_row(LINK, 0.100, 0.106), _row(LINK, 0.100, 0.094)], False),  # the mean is above 5 %
        ([_row(DELAY, 0.100, 0.129), _row(DELAY, 0.100, 0.1)], True),
        ([_row(LAYOUT, 0.100, 0.109), _row(LAYOUT, 0.2, 0.2)], True),
        ([_row(LAYOUT, 0.100, 0.106), _row(LAYOUT, 0.102, 0.105)], False),  # the wrong order
        ([_row(LOSS, 0.20, 0.24, is_share=True)], True),
        ([_row(LOSS, 0.20, 0.26, is_share=True)], False),
        ([_row(R4, 0.0155, 0.02)], True),
        ([_row(R4, 0.0165, 0.0165)], False),
    ],
)
def test_the_limits_are_those_of_each_group(rows, is_met):
    ((_, found),) = validate.verdicts(rows)
    assert found == is_met


def test_the_table_shows_errors_and_verdicts():
    text = validate.render([_row(LINK, 0.1, 0.104), _row(LOSS, 0.2, 0.26, is_share=True)], 200)
    assert "+4.0 %" in text and "+6.0 points" in text and "20.0 % late" in text
    assert "link: mean error 4.0 % (limit 5), largest error 4.0 % (limit 10): met." in text
    assert "loss: mean error 6.0 points, largest error 6.0 points (limit 5): missed." in text


@pytest.mark.parametrize(
    ("main", "words", "sentence"),
    [
        (validate.main, ["--groups=link,lost"], "lost is not a group. Use link, delay, layout, loss or r4."),
        (validate.main, ["--groups="], "nothing is not a group"),
        (validate.main, ["--trials=1"], "--trials=1"),
        (calibrate.main, ["--delays=1ms"], "needs emulated hosts. Add --fabric=ethernet-100m."),
        (calibrate.main, ["--fabric=r4", "--delays=soon"], "--delays=soon: 'soon' is not a time like 5us"),
        (calibrate.main, ["--fabric=none"], "is neither a profile nor a file"),
    ],
)
def test_what_cannot_be_done_is_refused_in_a_sentence(main, words, sentence):
    with pytest.raises(cli.UsageError) as refused:
        main(words)
    assert sentence in str(refused.value)
