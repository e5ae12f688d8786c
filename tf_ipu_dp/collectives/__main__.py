"""`python -m tf_ipu_dp.collectives SUBCOMMAND`: what a gradient all-reduce costs, measured and simulated."""

from __future__ import annotations

import difflib
import importlib
import os
import shutil
import sys
from typing import Sequence

from tf_ipu_dp import cli, flag_help, terminal_text

SUBCOMMANDS = {
    "size": "Shows how many bytes a training job all-reduces, by variable, by bucket and in all.",
    "measure": "Measures all-reduces on the engine that training uses, also across emulated hosts.",
    "calibrate": "Measures at 2 ranks what predictions for this machine start from, and keeps it.",
    "simulate": "Simulates all-reduces on any number of replicas.",
    "report": "Draws measurements, simulations and training runs: table, CDF, delay per trial.",
    "validate": "Measures, predicts, and shows how far the prediction is off.",
}
_EXAMPLES = (
    "  python -m tf_ipu_dp.collectives size --model=mlp --ipus=4 --instances=4",
    "  python -m tf_ipu_dp.collectives simulate --replicas=65536 --bytes=100MB --topology=pod64x1024",
)


def main(words: Sequence[str]) -> int:
    """Runs the subcommand that the first word names."""
    if not words or cli.wants_help(words[:1]):
        return cli.show(_render_subcommands())
    if words[0] not in SUBCOMMANDS:
        near = difflib.get_close_matches(words[0], SUBCOMMANDS, n=1)
        advice = f"Did you mean {near[0]}?" if near else f"Use {cli.alternatives(list(SUBCOMMANDS))}."
        what = f"The flag {words[0]} needs a subcommand before it" if words[0].startswith("-") else words[0]
        raise cli.UsageError(f"{what}. {advice}" if what != words[0] else f"{what} is not a subcommand. {advice}")
    # Each subcommand imports what it needs: size works without numpy, and none but measure needs Horovod.
    module = importlib.import_module(f"{__package__}.{words[0]}")
    code: int = module.main(words[1:])
    return code


def _render_subcommands() -> str:
    width = shutil.get_terminal_size().columns
    lines = terminal_text.render_names(SUBCOMMANDS, width)
    usage = flag_help.fill_usage("python -m tf_ipu_dp.collectives SUBCOMMAND [--flag=value ...]", width)
    text = "\n".join([usage, "", lines, "", "SUBCOMMAND --help lists its flags.", "", "Examples", *_EXAMPLES, ""])
    return cli.as_started(text, os.environ)


if __name__ == "__main__":
    sys.exit(cli.run("collectives", lambda: main(sys.argv[1:]), sys.stderr))
