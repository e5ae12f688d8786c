"""Prints docs/flags.md: `python -m tf_ipu_dp.config > docs/flags.md`."""

from __future__ import annotations

from tf_ipu_dp import cli
from tf_ipu_dp.config import flags_page

if __name__ == "__main__":
    raise SystemExit(cli.run("config", lambda: cli.show(flags_page.render_page()), None))
