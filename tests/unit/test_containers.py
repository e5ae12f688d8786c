"""The container files keep to hadolint's rules, and copy what is there and what .dockerignore lets through."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FILES = ("Dockerfile", "Dockerfile.poplar")


def instructions(name):
    """Returns the words of each instruction, with its continuation lines."""
    lines = (ROOT / "launch" / name).read_text(encoding="utf-8").splitlines()
    text = "\n".join(line for line in lines if not line.lstrip().startswith("#"))
    found = re.findall(r"^([A-Z]+) ((?:.*\\\n)*.*)$", text, re.MULTILINE)
    return [(kind, re.sub(r"\\\n\s*", "", rest)) for kind, rest in found]


@pytest.mark.parametrize("name", FILES)
def test_an_image_is_pinned_small_and_not_of_root_and_has_a_health_check(name):
    steps = instructions(name)
    kinds = [kind for kind, _ in steps]
    assert {"FROM", "USER", "HEALTHCHECK", "CMD"} <= set(kinds) and "ADD" not in kinds
    for kind, rest in steps:
        if kind == "FROM":
            assert re.match(r"(\$\{BASE\}|[\w/.-]+:[\w.-]+)( AS \w+)?$", rest) and "latest" not in rest
        if kind == "WORKDIR":
            assert rest.startswith("/")
        if kind in ("CMD", "ENTRYPOINT"):
            assert rest.startswith("[")
        if kind == "RUN" and "apt-get install" in rest:
            packages = rest.split("install ", 1)[1].split("&&")[0].split()
            assert all("=" in word for word in packages if not word.startswith("--"))
            assert "--no-install-recommends" in packages and "rm -rf /var/lib/apt/lists/*" in rest
    users = [rest for kind, rest in steps if kind == "USER"]
    assert users[-1].isdigit() and users[-1] != "0"


@pytest.mark.parametrize("name", FILES)
def test_an_image_copies_what_is_there_and_is_not_ignored(name):
    allowed = re.findall(r"^!(\S+)", (ROOT / ".dockerignore").read_text(encoding="utf-8"), re.MULTILINE)
    copied = [rest.split()[0] for kind, rest in instructions(name) if kind == "COPY" and "--from" not in rest]
    assert sorted(copied) == sorted(allowed)
    assert all((ROOT / source).exists() for source in copied)


def test_both_images_install_through_the_commands_of_the_package():
    for name in FILES:
        runs = [rest for kind, rest in instructions(name) if kind == "RUN"]
        assert sum("-m tf_ipu_dp.environment " in rest for rest in runs) == 1
        assert not any("pip install" in rest for rest in runs)
