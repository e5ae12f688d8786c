"""Draws circles, squares and crosses of random size, place and brightness into a folder for each class."""

import sys
from pathlib import Path

import numpy as np
import tensorflow as tf

SIZE, PER_CLASS = 32, 200


def draw(kind, random):
    rows, columns = np.mgrid[:SIZE, :SIZE]
    row, column = random.randint(10, SIZE - 10, 2)
    radius = random.randint(5, 10)
    inside = {
        "circle": (rows - row) ** 2 + (columns - column) ** 2 < radius**2,
        "square": np.maximum(abs(rows - row), abs(columns - column)) < radius * 0.85,
        "cross": (np.minimum(abs(rows - row), abs(columns - column)) < 2)
        & (np.maximum(abs(rows - row), abs(columns - column)) < radius),
    }[kind]
    image = random.randint(0, 80, (SIZE, SIZE, 3)) + inside[..., None] * random.randint(60, 175, 3)
    return image.astype(np.uint8)


def main(folder):
    random = np.random.RandomState(1)
    for kind in ("circle", "square", "cross"):
        (folder / kind).mkdir(parents=True, exist_ok=True)
        for number in range(PER_CLASS):
            encoded = tf.io.encode_png(draw(kind, random)).numpy()
            (folder / kind / f"{number:03d}.png").write_bytes(encoded)


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "images"))
