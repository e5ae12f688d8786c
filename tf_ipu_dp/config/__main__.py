"""Prints docs/flags.md: `python -m tf_ipu_dp.config > docs/flags.md`."""

from __future__ import annotations

import sys

from tf_ipu_dp.config import flags_page

if __name__ == "__main__":
    sys.stdout.write(flags_page.render_page())
