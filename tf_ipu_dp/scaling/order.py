"""The order in which cells are measured: repeats outermost, cells shuffled in each of them, engines alternating. Pure.

A machine that becomes slower during a study then slows all cells, and not the last ones.
"""

from __future__ import annotations

import random
from typing import Dict, List, Sequence, Tuple

from tf_ipu_dp.scaling.records import Cell


def plan_order(cells: Sequence[Cell], repeats: int, seed: int) -> List[Tuple[Cell, int]]:
    """Returns every cell with every repeat. The same seed gives the same order, and more repeats only append."""
    return [(cell, repeat) for repeat in range(repeats) for cell in _shuffle(cells, f"{seed}/{repeat}")]


def _shuffle(cells: Sequence[Cell], seed: str) -> List[Cell]:
    """Returns the cells in a random order in which no engine follows itself, as long as others have cells left."""
    generator = random.Random(seed)  # noqa: S311
    left: Dict[str, List[Cell]] = {}
    for cell in generator.sample(list(cells), len(cells)):
        left.setdefault(cell.engine, []).append(cell)
    order: List[Cell] = []
    while left:
        names = [name for name in left if not order or name != order[-1].engine] or list(left)
        # The engine with most cells left: one that is saved for last would follow itself.
        name = max(generator.sample(names, len(names)), key=lambda each: len(left[each]))
        order.append(left[name].pop())
        if not left[name]:
            del left[name]
    return order
