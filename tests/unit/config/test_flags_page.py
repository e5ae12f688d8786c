from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tf_ipu_dp.config import flags_page, train_flags

PAGE = Path(__file__).resolve().parents[3] / "docs" / "flags.md"


def test_the_committed_page_is_what_the_declarations_make():
    made = subprocess.run([sys.executable, "-m", "tf_ipu_dp.config"], capture_output=True, text=True, check=True).stdout
    assert PAGE.read_text(encoding="utf-8") == made, "Run: python -m tf_ipu_dp.config > docs/flags.md"


def test_every_flag_has_one_row_with_its_form_default_and_class():
    rows = [line for line in flags_page.render_page().splitlines() if line.startswith("| `--")]
    assert len(rows) == len(train_flags.FLAGS)
    assert "| `--micro_batch_size=N` | Samples in one forward pass of one replica. | 32 | may differ |" in rows
    assert any(row.startswith("| `--reduction={mean,sum}` |") for row in rows)
    assert any(row.startswith("| `--hosts=N` or `--hosts=a,b` |") for row in rows)
    assert all(row.count("|") == 5 for row in rows)
    assert any(row.startswith("| `--[no]prefetch` |") and row.endswith("| on | may differ |") for row in rows)
