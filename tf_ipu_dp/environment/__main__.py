"""Makes and repairs the Python environment that the wrappers in launch/ run in.

Three targets: `run` (one instance), `distributed` (with Horovod), `test` (with test and lint tools). A fourth one,
`ddp`, adds PyTorch without CUDA, which the scaling study compares with.

    launch/train                                  makes .venv in the clone for `run`
    python -m tf_ipu_dp.environment distributed   adds Horovod to the environment of the Python that runs it
    python -m tf_ipu_dp.environment ddp           adds PyTorch to it

An environment is used only when it is complete. A marker file stands beside it during an installation: a start that
finds the marker of an interrupted one finishes it, and a start during an installation waits for it. What a running job
uses is never replaced. In the environment of an enabled Poplar SDK no installed package is ever changed: only missing
ones are added.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import NoReturn, Sequence

from tf_ipu_dp.environment import installation, versions
from tf_ipu_dp.environment.status import SetupError, Status


def main(words: Sequence[str]) -> int:
    """Makes the environment and prints the path of its Python."""
    status = Status("environment", sys.stderr)
    try:
        args = _parse(words)
        status = Status(args.program, sys.stderr)
        python = installation.make(args.target, args.venv, args.key, status)
    except SetupError as problem:
        status.info(str(problem))
        return 1
    except OSError as error:
        reason = f"{error.strerror or error}{f' ({error.filename})' if error.filename else ''}"
        status.info(f"the environment cannot be made: {reason}. Fix that, or set TF_IPU_DP_VENV to another directory.")
        return 1
    except KeyboardInterrupt:
        status.info("interrupted; the next start finishes the installation.")
        return 130
    print(python)
    return 0


class _Parser(argparse.ArgumentParser):
    """A parser for which a mistake is one sentence, as for the other commands."""

    def error(self, message: str) -> NoReturn:
        raise SetupError(f"{message}. See --help.")


def _parse(words: Sequence[str]) -> argparse.Namespace:
    targets = sorted({*versions.TARGETS, *versions.ADDED})
    parser = _Parser(
        prog="python -m tf_ipu_dp.environment",
        description=__doc__.split("\n", maxsplit=1)[0],
        epilog="Examples\n  python -m tf_ipu_dp.environment distributed",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("target", nargs="?", help=f"what the environment is for: {', '.join(targets)}")
    parser.add_argument("--venv", type=Path, help="environment to make; default: the one this Python belongs to")
    parser.add_argument("--program", default="environment", help="name in front of messages")
    parser.add_argument("--key", default="", help="what launch/environment.sh compares before it skips this program")
    args = parser.parse_args(words)
    if args.target not in targets:
        given = f"{args.target} is no target" if args.target else "the target is missing"
        raise SetupError(f"{given}. Use {', '.join(targets[:-1])} or {targets[-1]}.")
    return args


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
