from __future__ import annotations

import shutil
import subprocess

import pytest

from tf_ipu_dp import __main__ as front
from tf_ipu_dp import cli, completion
from tf_ipu_dp.config import train_flags
from tf_ipu_dp.planning import architectures

SUBCOMMANDS = completion.read_subcommands()
FLAGS = completion.read_flags(SUBCOMMANDS)


def test_every_flag_of_train_can_be_completed_with_its_choices():
    found = {flag.name: flag for flag in FLAGS["train"]}
    assert sorted(found) == sorted(flag.name for flag in train_flags.FLAGS)
    for flag in train_flags.FLAGS:
        choices = tuple(getattr(flag.parser, "enum_values", None) or ())
        assert found[flag.name].switch == isinstance(flag.default, bool)
        if choices:
            assert found[flag.name].choices == choices


def test_every_command_and_subcommand_has_its_flags():
    assert {name.split()[0] for name in FLAGS} == {*front.COMMANDS} - {"emulator", "emulator.poprun"}
    assert SUBCOMMANDS["completion"] == ["bash", "zsh", "fish"] and "simulate" in SUBCOMMANDS["collectives"]
    assert "replicas" in {flag.name for flag in FLAGS["collectives simulate"]}
    assert {"max_restarts", "model"} <= {flag.name for flag in FLAGS["launch"]}


def complete(shell_script, line):
    """Returns what bash offers at the end of a line."""
    program = f"{shell_script}\nCOMP_LINE=$1 COMP_POINT=${{#1}}\n_tf_ipu_dp\nprintf '%s\\n' \"${{COMPREPLY[@]}}\""
    command = ["bash", "--norc", "-c", program, "bash", line]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("tf-ipu-dp tra", ["train"]),
        ("tf-ipu-dp train --mod", ["--model="]),
        ("launch/train --mod", ["--model="]),
        ("launch/train --ipus=8 --model=resnet1", [name for name in architectures.MODELS if "resnet1" in name]),
        ("launch/tf-ipu-dp train --precision=16", ["16.32", "16.16"]),
        ("tf-ipu-dp train --dataset=cifar", ["cifar10", "cifar100"]),
        ("tf-ipu-dp train --nores", ["--noresume"]),
        ("tf-ipu-dp collectives si", ["size", "simulate"]),
        ("tf-ipu-dp collectives simulate --replic", ["--replicas="]),
        ("tf-ipu-dp completion b", ["bash"]),
        ("tf-ipu-dp train --vers", ["--version"]),
    ],
)
def test_bash_completes_commands_flags_and_values(line, offered):
    assert complete(completion.render("bash", FLAGS, SUBCOMMANDS), line) == offered


@pytest.mark.parametrize("shell", list(completion.SHELLS))
def test_the_script_of_a_shell_names_every_command_and_is_accepted_by_it(shell, tmp_path):
    script = tmp_path / "script"
    script.write_text(completion.render(shell, FLAGS, SUBCOMMANDS), encoding="utf-8")
    assert all(name in script.read_text(encoding="utf-8") for name in front.COMMANDS)
    if shutil.which(shell):
        done = subprocess.run([shell, "-n", str(script)], capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ([], "the name of the shell is needed. Use bash, zsh or fish."),
        (["bsh"], "bsh is not a shell that is known. Did you mean bash?"),
        (["powershell"], "powershell is not a shell that is known. Use bash, zsh or fish."),
    ],
)
def test_another_shell_is_refused(words, sentence):
    with pytest.raises(cli.UsageError) as caught:
        completion.main(words)
    assert str(caught.value) == sentence
