"""Runs the code of users that flags name, and prints what a plan needs of it, as JSON.

The planner starts it in a process of its own, because it needs TensorFlow: see `datasets.facts`.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from typing import Sequence

from tf_ipu_dp import cli
from tf_ipu_dp.config import train_flags
from tf_ipu_dp.datasets import facts


def main(words: Sequence[str]) -> int:
    """Prints the facts of the data and model that the flags name, or the problems that they have."""
    cfg = train_flags.parse(words)
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    try:
        # What the code of users prints must not be taken for the result.
        with contextlib.redirect_stdout(sys.stderr):
            from tf_ipu_dp.training import own_models  # imports TensorFlow

            value = facts.to_json(own_models.learn(cfg))
    except cli.UsageError as error:
        value = {"problems": list(error.sentences)}
    sys.stdout.write(f"{json.dumps(value)}\n")
    return 0


if __name__ == "__main__":
    sys.exit(cli.run("learn", lambda: main(sys.argv[1:]), sys.stderr))
