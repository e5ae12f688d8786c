from __future__ import annotations

import io
import os

import pytest
from absl import flags

import tf_ipu_dp
from tf_ipu_dp import __main__, cli, train


def make_flags():
    fv = flags.FlagValues()
    flags.DEFINE_integer("ipus", 1, "How many.", lower_bound=1, flag_values=fv)
    flags.DEFINE_enum("sdk", "auto", ["auto", "poplar"], "Which.", flag_values=fv)
    flags.DEFINE_bool("json", False, "As JSON.", flag_values=fv)
    return fv


def parse(*words):
    fv = make_flags()
    cli.parse(words, fv)
    return {name: fv[name].value for name in fv}


def sentences(*words):
    with pytest.raises(cli.UsageError) as caught:
        parse(*words)
    return list(caught.value.sentences)


@pytest.fixture
def flag_file(tmp_path):
    path = tmp_path / "run.flags"
    path.write_text("# what it is for\n--ipus=4\n\n--sdk=poplar\n", encoding="utf-8")
    return str(path)


@pytest.mark.parametrize("order", ["file first", "file last", "two words"])
def test_a_flag_on_the_line_wins_over_the_file_wherever_the_file_stands(flag_file, order):
    file_words = ["--flagfile", flag_file] if order == "two words" else [f"--flagfile={flag_file}"]
    words = [*file_words, "--ipus=16"] if order == "file first" else ["--ipus=16", *file_words]
    assert parse(*words) == {"ipus": 16, "sdk": "poplar", "json": False}


def test_of_two_files_the_later_wins(flag_file, tmp_path):
    other = tmp_path / "other.flags"
    other.write_text("--ipus=2\n", encoding="utf-8")
    assert parse(f"--flagfile={flag_file}", f"--flagfile={other}")["ipus"] == 2


def test_a_file_may_name_another_file(flag_file, tmp_path):
    outer = tmp_path / "outer.flags"
    outer.write_text(f"--flagfile={flag_file}\n--json\n", encoding="utf-8")
    assert parse(f"--flagfile={outer}") == {"ipus": 4, "sdk": "poplar", "json": True}


def test_values_may_stand_apart_and_booleans_may_be_negated():
    assert parse("--ipus", "8", "--nojson") == {"ipus": 8, "sdk": "auto", "json": False}


def test_every_mistake_of_a_line_is_reported():
    assert sentences("--ipsu=8", "--ipus=0", "--sdk=gpu", "extra", "--nojson=1") == [
        "--ipus=0 is not possible. It takes a whole number from 1 on.",
        "--sdk=gpu is not possible. It takes auto or poplar.",
        "--nojson=1 does not take an argument. Write --nojson, or --json.",
        "--ipsu is not a flag. Did you mean --ipus?",
        "'extra' is not expected here. Options start with --.",
    ]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--ipus", "-4"], "--ipus=-4 is not possible. It takes a whole number from 1 on."),
        (["--ipus=a: b: c"], "--ipus=a: b: c is not possible. It takes a whole number from 1 on."),
        (["--json=maybe"], "--json=maybe is not possible. It takes true or false."),
        (["ipus=8"], "'ipus=8' is not expected here. Did you mean --ipus=8?"),
        (["--IPUS=8"], "--IPUS is not a flag. Did you mean --ipus?"),
        (["--flagfile="], "--flagfile needs the path of a text file of flags."),
        (["--json", "--flagfile"], "--flagfile needs the path of a text file of flags."),
        (["--flagfile", "--json"], "--flagfile needs the path of a text file of flags."),
        (["--undefok=foo", "--foo=3"], "--undefok is not a flag: unknown flags are always refused."),
    ],
)
def test_a_mistake_is_one_sentence(words, sentence):
    assert sentences(*words) == [sentence]


def test_the_value_of_an_unknown_flag_is_not_a_second_mistake():
    assert sentences("--ipuss", "8") == ["--ipuss is not a flag. Did you mean --ipus?"]


def test_a_flag_like_none_of_ours_is_refused_without_a_guess():
    assert sentences("--verbosity=1") == ["--verbosity is not a flag. See --help for those that are."]


def test_a_flag_that_only_shares_letters_is_not_offered():
    assert sentences("--just") == ["--just is not a flag. See --help for those that are."]


def test_a_choice_that_is_nearly_right_is_offered():
    assert sentences("--sdk=popler") == [
        "--sdk=popler is not possible. Did you mean --sdk=poplar? It takes auto or poplar."
    ]


def test_the_numbers_of_errors_are_not_shown():
    assert cli.render_problems("train", ["x cannot be read: [Errno 2] No such file or directory: 'x'."]) == (
        "train: x cannot be read: No such file or directory: 'x'.\n"
    )


def test_a_missing_value_is_reported():
    assert sentences("--ipus") == ["--ipus needs a value: --ipus=N."]


@pytest.mark.parametrize("content", [None, b"\xff\xfe\x00"])
def test_an_unreadable_flag_file_is_one_sentence(tmp_path, content):
    path = tmp_path / "x.flags"
    if content:
        path.write_bytes(content)
    (sentence,) = sentences(f"--flagfile={path}")
    assert sentence.startswith(f"--flagfile={path} cannot be read: ")
    assert "Errno" not in sentence and "Unable to open" not in sentence


def test_a_mistake_in_a_flag_file_is_reported_too(tmp_path):
    path = tmp_path / "x.flags"
    path.write_text("--ipus=none\n", encoding="utf-8")
    assert sentences(f"--flagfile={path}") == ["--ipus=none is not possible. It takes a whole number from 1 on."]


def test_help_shows_groups_forms_and_defaults():
    text = cli.render_help("prog", "About it.", {"Where": ("ipus", "sdk"), "Output": ("json",)}, make_flags(), 80)
    assert text == (
        "usage: prog\n\nAbout it.\n\n"
        "Where\n  --ipus=N           How many. Default: 1.\n  --sdk=auto|poplar  Which. Default: auto.\n\n"
        "Output\n  --[no]json         As JSON. Default: off.\n\n"
        "--flagfile=PATH reads flags from a file, one per line; a flag on the command\n"
        "line wins over the file's.\n"
    )


@pytest.mark.parametrize("width", [40, 59, 60, 80, 120, 200])
def test_help_is_as_wide_as_the_terminal(width):
    fv = make_flags()
    flags.DEFINE_bool("long", True, "Some words of this text. " * 20, flag_values=fv)
    usage = "python -m tf_ipu_dp.prog [--flag=value ...] RUN_DIR RUN_DIR"
    text = cli.render_help(usage, "Some words of this text. " * 20, {"All": ("ipus", "long")}, fv, width)
    assert " ".join(text.split("\n\n")[0].split()) == f"usage: {usage}"
    assert width - 10 < max(map(len, text.splitlines())) <= width
    assert "Default: on." in text.replace("\n" + " " * 6, " ")


@pytest.mark.parametrize("width", range(40, 60))
def test_help_is_broken_between_words_and_not_at_their_hyphens(width):
    fv = make_flags()
    words = "Print the IPUs as gc-monitor does, or a set of tensorflow-datasets with --no-such-flag. "
    flags.DEFINE_bool("long", True, words, flag_values=fv)
    lines = cli.render_help("prog", words, {"All": ("long",)}, fv, width).splitlines()
    assert not [line for line in lines if line.endswith("-")] and max(map(len, lines)) <= width


def test_a_long_path_of_the_command_stays_in_the_first_line_of_its_usage():
    own = "/a/rather/long/path/of/a/clone/launch/train"
    text = cli.render_help(f"{own} [--flag=value ...]", "About it.", {"All": ("ipus",)}, make_flags(), 40)
    assert text.startswith(f"usage: {own}\n  [--flag=value ...]\n\n")
    assert __main__.render_commands(40, "/a/rather/long/path/of/a/clone/launch/").startswith(
        "usage: /a/rather/long/path/of/a/clone/launch/tf-ipu-dp"
    )


def test_help_ends_with_the_examples():
    text = cli.render_help("prog", "About it.", {"Where": ("ipus",)}, make_flags(), 80, ["prog --ipus=8"])
    assert text.endswith("file's.\n\nExamples\n  prog --ipus=8\n")


def test_commands_are_named_as_they_are_started(tmp_path):
    (tmp_path / "train").touch(mode=0o755)
    text = "Use python -m tf_ipu_dp.train --ipus=8, or python -m tf_ipu_dp.emulator.poprun."
    assert cli.as_started(text, {}) == text
    assert cli.as_started(text, {"TF_IPU_DP_LAUNCH": str(tmp_path)}) == (
        f"Use {tmp_path}/train --ipus=8, or {tmp_path}/tf-ipu-dp emulator.poprun."
    )


def test_the_version_is_an_answer_and_no_run(capsys):
    assert cli.run("train", lambda: parse("--ipus=0", "--version")["ipus"], io.StringIO()) == 0
    assert capsys.readouterr().out == f"tf_ipu_dp {tf_ipu_dp.__version__}\n"


@pytest.mark.parametrize("word", ["--help", "-h", "-help", "--helpfull"])
def test_help_is_wanted(word):
    assert cli.wants_help(["--ipus=1", word]) and not cli.wants_help(["--", word])


def test_one_problem_is_a_line_and_several_are_a_list():
    assert cli.render_problems("train", ["A."]) == "train: A.\n"
    assert cli.render_problems("train", ["A.", "B."]) == "train: 2 problems:\n  1. A.\n  2. B.\n"


def test_a_users_mistake_ends_with_1_and_ours_with_a_traceback():
    stream = io.StringIO()

    def mistaken():
        raise cli.UsageError("No.")

    assert cli.run("train", mistaken, stream) == 1
    assert stream.getvalue() == "train: No.\n"
    with pytest.raises(ZeroDivisionError):
        cli.run("train", lambda: 1 // 0, stream)


@pytest.mark.parametrize(("values", "text"), [([1], "1"), ([1, 2], "1 or 2"), ([1, 2, 3], "1, 2 or 3")])
def test_alternatives_read_like_a_sentence(values, text):
    assert cli.alternatives(values) == text


def test_the_list_of_commands_names_them_as_they_are_started():
    text = __main__.render_commands(80)
    assert text.startswith("usage: tf-ipu-dp COMMAND ") and "\n  tf-ipu-dp monitor --watch=1\n" in text
    text = __main__.render_commands(120, "../clone/launch/")
    assert text.startswith("usage: ../clone/launch/tf-ipu-dp COMMAND ")
    assert "\n  ../clone/launch/tf-ipu-dp monitor --watch=1\n" in text


def test_a_path_that_may_not_be_entered_is_a_sentence(tmp_path):
    (tmp_path / "closed").mkdir(mode=0)

    def look(words):
        mine = os.geteuid()
        try:
            os.seteuid(mine or 65534)  # root may enter everything
            return train.main(["--dry_run", *words])
        finally:
            os.seteuid(mine)

    for flag, name in (("run_dir", "run.flags"), ("dataset", "dataset_info.json"), ("model", "")):
        path = tmp_path / "closed" / "x.py"
        stderr = io.StringIO()
        word = f"--{flag}={path}" + ("" if name else ":make")
        assert cli.run("train", lambda word=word: look([word]), stderr) == 1
        assert stderr.getvalue() == f"train: {path / name if name else path} cannot be used: Permission denied.\n"


@pytest.mark.parametrize("flag", ["run_dir", "data_dir", "init_from", "dataset", "model"])
def test_the_home_of_a_user_that_does_not_exist_is_a_sentence(flag, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = "~nosuchuser/x" + (".py:make" if flag == "model" else "")
    with pytest.raises(cli.UsageError, match="nosuchuser"):
        train.main(["--dry_run", f"--{flag}={path}"])
