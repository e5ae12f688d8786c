"""Downloads and prepares a set with tensorflow-datasets, which imports TensorFlow when it is used."""

from __future__ import annotations

import contextlib
import fcntl
import http.client
import importlib.util
import os
import sys
import threading
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any, Iterator, List, NoReturn, Optional

from tf_ipu_dp import cli
from tf_ipu_dp.datasets import lookup
from tf_ipu_dp.datasets.info import TFDS, DatasetInfo

_REACHABLE_WITHIN_S = 5.0


def download(name: str, data_dir: Optional[str]) -> lookup.Prepared:
    """Prepares a set with tensorflow-datasets, one process at a time, and returns it; UsageError if that fails."""
    if not lookup.can_be_downloaded(name):
        lookup.refuse_missing(name, data_dir)
    tfds = import_tfds(name)
    # Otherwise a host that cannot reach Google's storage waits for more than a minute.
    tfds.core.utils.gcs_utils._is_gcs_disabled = True
    root = lookup.data_folder(data_dir)
    try:
        builder = tfds.builder(name, data_dir=str(root))
        if not all(map(_is_reachable, builder.url_infos)):
            _refuse_download(name, data_dir)
        print(f"downloading {cli.printable(f'{name} to {root}')} ...", file=sys.stderr, flush=True)
        root.mkdir(parents=True, exist_ok=True)
        # tensorflow-datasets writes to stdout, which carries the result of the run.
        with _lock(root / ".tf_ipu_dp.lock"), contextlib.redirect_stdout(sys.stderr):
            builder.download_and_prepare(download_config=tfds.download.DownloadConfig(try_download_gcs=False))
    except cli.UsageError:
        raise
    except Exception as error:
        reason = " ".join(str(error).split())[:200]
        lookup.refuse_missing(name, data_dir, f"its download failed ({type(error).__name__}: {reason})")
    return lookup.read_prepared(name, data_dir) or lookup.refuse_missing(name, data_dir)


def require_available(facts: DatasetInfo, data_dir: Optional[str]) -> None:
    """Raises a UsageError for a set that is neither prepared nor can be downloaded from here. No TensorFlow."""
    if facts.origin != TFDS or lookup.read_prepared(facts.name, data_dir):
        return
    if not lookup.can_be_downloaded(facts.name):
        lookup.refuse_missing(facts.name, data_dir)
    if importlib.util.find_spec("tensorflow_datasets") is None:
        import_tfds(facts.name)
    if facts.download_url and not _is_reachable(facts.download_url):
        _refuse_download(facts.name, data_dir)


def _refuse_download(name: str, data_dir: Optional[str]) -> NoReturn:
    lookup.refuse_missing(name, data_dir, "cannot be downloaded from here")


def import_tfds(name: str) -> Any:
    """Returns the module tensorflow_datasets, or refuses the set that needs it."""
    try:
        import tensorflow_datasets
    except ImportError as error:
        raise cli.UsageError(
            f"--dataset={name} needs tensorflow-datasets, which cannot be imported ({error}). Install it with "
            "python -m pip install tensorflow-datasets, or use --dataset=fashion_mini or synthetic."
        ) from error
    return tensorflow_datasets


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    # Several users may share the folder: a link of that name is not followed, and nothing is written.
    lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def _is_reachable(url: str) -> bool:
    """Whether a download would begin within seconds; tensorflow-datasets itself would try for minutes."""
    answers: List[bool] = []

    def open_url() -> None:
        try:
            with urllib.request.urlopen(url, timeout=_REACHABLE_WITHIN_S):
                answers.append(True)
        except urllib.error.HTTPError:
            answers.append(True)  # the host responds: whether it still has the file, the download shows
        except (OSError, http.client.HTTPException):
            pass

    # In a thread, because the lookup of a host name has no timeout.
    thread = threading.Thread(target=open_url, daemon=True)
    thread.start()
    thread.join(_REACHABLE_WITHIN_S)
    return bool(answers)
