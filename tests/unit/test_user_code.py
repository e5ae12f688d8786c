"""Functions of users by reference: what is loaded, what it is called with, and what is said of mistakes."""

from __future__ import annotations

import re

import pytest

from tf_ipu_dp import cli, user_code
from tf_ipu_dp.config import train_flags
from tf_ipu_dp.datasets import facts


@pytest.fixture
def file(tmp_path, monkeypatch):
    """Returns a function that writes code to a file and returns its path."""
    monkeypatch.chdir(tmp_path)

    def write(text, name="mine.py"):
        (tmp_path / name).write_text(text, encoding="utf-8")
        return str(tmp_path / name)

    return write


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("mine.py:build", True),
        ("folder/mine.py:Models.build", True),
        ("package.module:build", True),
        ("cnn", False),
        ("mine.py", False),
        ("cifar10:3.0.2", False),
        ("set/config:1.2.3", False),
        ("mine.py:", False),
        (":build", False),
    ],
)
def test_a_reference_is_recognised(text, expected):
    assert user_code.is_reference(text) is expected


def test_a_function_of_a_file_is_loaded_once_and_can_import_its_neighbours(file):
    file("NUMBER = 7\n", "neighbour_of_mine.py")
    path = file(
        "import neighbour_of_mine\nCALLS = []\n"
        "def build(): CALLS.append(1); return neighbour_of_mine.NUMBER, len(CALLS)"
    )
    assert user_code.load_function(f"{path}:build")() == (7, 1)
    assert user_code.load_function(f"{path}:build")() == (7, 2)
    file("def build(): return 'new'")
    assert user_code.load_function(f"{path}:build")() == "new"


def test_a_function_of_a_module_is_loaded_from_the_current_folder(file):
    file("class Models:\n    @staticmethod\n    def build(): return 3\n", "module_of_user_code_test.py")
    assert user_code.load_function("module_of_user_code_test:Models.build")() == 3


def test_a_function_gets_what_it_asks_for_by_name(file):
    def build(classes, norm="group", *, extra=5, **others):
        return classes, norm, extra, others

    assert user_code.call_by_name(build, {"classes": 10, "norm": "batch", "more": 1}, "x:build") == (10, "batch", 5, {})


@pytest.mark.parametrize(
    ("code", "function", "message"),
    [
        ("def build(", "build", r"mine.py:build cannot be imported: SyntaxError: .* \(.*mine.py, line 1\)\."),
        (
            "x = 1\nimport missing_package_of_mine\n",
            "build",
            r"imported: ModuleNotFoundError: No module named 'missing_package_of_mine' \(.*mine.py, line 2\)\.",
        ),
        ("raise ValueError('no')", "build", r"cannot be imported: ValueError: no \(.*mine.py, line 1\)\."),
        ("import sys\nsys.exit(3)", "build", r"its code left Python \(SystemExit: 3\)\."),
        ("def build_it(): pass", "buildit", r"has no function 'buildit'\. Did you mean build_it\?"),
        ("def a(): pass\ndef b(): pass", "zzzzz", r"has no function 'zzzzz'\. It has a or b\."),
        ("build = 3", "build", r"mine.py:build is a int, not a function\. It defines no function\."),
    ],
)
def test_code_that_does_not_load_is_one_sentence_with_the_users_own_line(file, code, function, message):
    path = file(code)
    with pytest.raises(cli.UsageError) as caught:
        user_code.load_function(f"{path}:{function}")
    assert re.search(message, str(caught.value)), str(caught.value)
    assert "tf_ipu_dp/user_code" not in str(caught.value)


def test_a_missing_file_names_the_nearest_and_a_missing_module_what_works(file, tmp_path):
    file("", "model.py")
    with pytest.raises(cli.UsageError, match=r"there is no file .*modle.py on this host. Did you mean .*model.py\?"):
        user_code.load_function(f"{tmp_path}/modle.py:build")
    with pytest.raises(cli.UsageError, match="there is no module 'nowhere_at_all' in"):
        user_code.load_function("nowhere_at_all.models:build")


def test_a_missing_file_is_refused_before_a_process_imports_tensorflow_for_it(file, tmp_path, monkeypatch, capfd):
    path = file("", "model.py")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with pytest.raises(cli.UsageError, match=r"^--model=modle.py:build: there is no file modle.py .* mean model.py\?"):
        facts.find(train_flags.parse(["--model=modle.py:build"]))
    with pytest.raises(cli.UsageError, match=r"^--dataset=data.py:load: there is no file data.py on this host"):
        facts.find(train_flags.parse([f"--model={path}:build", "--dataset=data.py:load"]))
    assert capfd.readouterr().err == ""


def test_an_argument_that_is_not_known_is_refused_with_those_that_are(file):
    def build(clases):
        return clases

    with pytest.raises(cli.UsageError, match=r"asks for 'clases', which is not known. Did you mean classes\?"):
        user_code.call_by_name(build, {"classes": 10, "norm": "batch"}, "mine.py:build")


def test_an_error_of_the_function_has_its_own_place(file):
    path = file("def build(classes):\n    unused = 1\n    return {}['a']\n")
    with pytest.raises(cli.UsageError, match=r"mine.py:build failed: KeyError: 'a' \(.*mine.py, line 3\)\."):
        user_code.call_by_name(user_code.load_function(f"{path}:build"), {"classes": 1}, f"{path}:build")


def test_an_error_in_a_file_that_is_imported_from_beside_has_its_place_there(file):
    file("def divide():\n    return 1 / 0\n", "beside_of_user_code_test.py")
    path = file("import beside_of_user_code_test\nbeside_of_user_code_test.divide()\n")
    with pytest.raises(cli.UsageError, match=r"division by zero \(.*beside_of_user_code_test.py, line 2\)\."):
        user_code.load_function(f"{path}:build")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("in user code:\n\n  File \"x\", line 3\n\n    ValueError: Exception encountered when calling layer 'a'.\n\n"
         "    Input 0 is incompatible\n\n    Call arguments: b", "ValueError: Input 0 is incompatible."),
        ("{{function_node __wrapped__Add}} Incompatible shapes: [2] vs. [3] [Op:Add] name: x",
         "ValueError: Incompatible shapes: [2] vs. [3]."),
        ("", "ValueError."),
    ],
)  # fmt: skip
def test_the_reason_of_an_error_is_found_among_the_lines_around_it(text, reason):
    assert user_code.describe_error(ValueError(text)) == reason


def test_a_given_function_has_a_reference_that_stands_for_it(file):
    path = file("def build(): return 1")
    function = user_code.load_function(f"{path}:build")
    assert user_code.register(function, "model") == "mine.py:build"
    assert user_code.load_function("mine.py:build") is function
    reference = user_code.register(lambda: 5, "model")
    assert reference == "__main__:model"
    assert user_code.is_only_in_this_process(reference)
    assert user_code.load_function(reference)() == 5


def test_a_file_that_trains_when_it_is_loaded_is_refused(file):
    path = file("import tf_ipu_dp\ntf_ipu_dp.plan(ipus=2)\ndef build(): return 1\n")
    with pytest.raises(
        cli.UsageError, match=r"mine.py trains when it is loaded for one of its functions. Put that und"
    ):
        user_code.load_function(f"{path}:build")
    user_code.require_not_loading()


def test_the_digest_follows_the_file(file):
    path = file("def build(): return 1")
    before = user_code.code_digest(f"{path}:build")
    assert before and user_code.code_digest(f"{path}:build") == before
    file("def build(): return 2")
    assert user_code.code_digest(f"{path}:build") not in ("", before)
    assert user_code.code_digest("nowhere_at_all:build") == ""


def test_the_digest_follows_what_the_file_imports_from_its_folder_and_nothing_else(file, tmp_path):
    (tmp_path / "parts" / "inner").mkdir(parents=True)
    file("import math\n", "parts/__init__.py")
    file("from . import sizes\nfrom .inner.deep import DEPTH\n", "parts/blocks.py")
    file("WIDTH = 8\n", "parts/sizes.py")
    file("DEPTH = 2\n", "parts/inner/deep.py")
    file("import mine\n", "names_of_layers.py")  # imports in a circle
    file("unused = 1\n", "another.py")
    path = file(
        "import json\nimport tf_ipu_dp\ndef build():\n    from parts.blocks import block\n    import names_of_layers\n"
    )
    seen = {user_code.code_digest(f"{path}:build")}
    assert user_code.code_digest("mine:build") in seen
    file("unused = 2\n", "another.py")
    assert user_code.code_digest(f"{path}:build") in seen
    for number, name in enumerate(
        ("parts/__init__.py", "parts/blocks.py", "parts/sizes.py", "parts/inner/deep.py", "names_of_layers.py"), 2
    ):
        (tmp_path / name).write_text(f"{(tmp_path / name).read_text()}# changed\n", encoding="utf-8")
        seen.add(user_code.code_digest(f"{path}:build"))
        assert len(seen) == number, name
    file("def broken(", "parts/sizes.py")  # nothing is run, and what cannot be parsed imports nothing
    assert user_code.code_digest(f"{path}:build") not in seen
