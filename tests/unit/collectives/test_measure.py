"""What measure refuses before it starts anything."""

from __future__ import annotations

import pytest

from tf_ipu_dp import cli
from tf_ipu_dp.collectives import measure


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--bytes=many"], "--bytes=many: 'many' is not a size like 971048, 4KiB or 64MB."),
        (["--bytes=4MiB..1KiB"], "is an empty range"),
        (["--bytes=4KiB", "--ranks=0"], "--ranks=0"),
        (["--bytes=4KiB", "--ranks=many"], "--ranks=many"),
        (["--bytes=4KiB", "--trials=0"], "--trials=0"),
        (["--model=mlp"], "An all-reduce needs 2 ranks or more, and this job has 1 instance. Add --ranks=2"),
        (["--bytes=4KiB", "--hosts=a,b", "--ranks=3"], "--ranks=3 cannot be spread evenly over 2 hosts."),
        (["--bytes=4KiB", "--hosts=2"], "Give names, like --hosts=a,b."),
        (["--bytes=4KiB", "--fabric=r4", "--ranks=6"], "cannot be spread evenly over 4 hosts. Use --ranks=4 or 8."),
        (["--bytes=4KiB", "--fabric=r4", "--hosts=a,b"], "Leave one of them out."),
        (["--bytes=4KiB", "--fabric=r5"], "Did you mean r4?"),
        (["--bytes=4KiB", "--rate=1Gbit"], "needs emulated hosts. Add --fabric=PROFILE"),
        (["--bytes=4KiB", "--fabric=r4", "--rate=-1Gbit"], "--rate"),
        (["--bytes=4KiB", "--engine=nccl"], "--engine=nccl"),
        (["--bites=4KiB"], "Did you mean --bytes?"),
        (["--ipus=3"], "IPUs come in powers of two"),
    ],
)  # fmt: skip
def test_a_measurement_that_cannot_be_made_is_refused_in_a_sentence(words, sentence):
    with pytest.raises(cli.UsageError) as refused:
        measure.main(words)
    assert sentence in str(refused.value)


def test_a_folder_of_other_files_is_not_written_to(tmp_path):
    (tmp_path / "mine.txt").write_text("precious")
    with pytest.raises(cli.UsageError, match="is a folder of other files"):
        measure.main(["--bytes=4KiB", f"--out={tmp_path}"])
    with pytest.raises(cli.UsageError, match="is a file"):
        measure.main(["--bytes=4KiB", f"--out={tmp_path / 'mine.txt'}"])
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]
