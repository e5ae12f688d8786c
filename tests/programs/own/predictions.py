"""Trains models of each kind in one process, and predicts with each from its checkpoint, its export and in Python."""

import csv
import json
import shutil
from pathlib import Path

import kinds
import numpy as np
import tensorflow as tf

import tf_ipu_dp
from tf_ipu_dp import predict

RANDOM = np.random.RandomState(0)
SMALL = {"ipus": 2, "micro_batch_size": 8, "epochs": 1, "export": True}


def write_inputs():
    for name, level in (("cat", 0), ("dog", 99)):
        for number in range(20):
            pixels = (RANDOM.randint(0, 99, (12, 12, 3)) + level).astype(np.uint8)
            tf.io.write_file(f"pets/{name}/{number:02d}.png", tf.io.encode_png(pixels))
    pairs = RANDOM.normal(size=(100, 2)).round(3)
    rows = ["x,y,label", *(f"{x},{y},{'up' if x + y > 0 else 'down'}" for x, y in pairs)]
    Path("words.csv").write_text("\n".join(rows), encoding="utf-8")
    Path("numbers.csv").write_text("\n".join(["y,label,x", *(f"{y},{x + y},{x}" for x, y in pairs)]), encoding="utf-8")
    Path("in.csv").write_text("\n".join(["other,y,x", *(f"-,{y},{x}" for x, y in pairs[:13])]), encoding="utf-8")
    Path("swapped.csv").write_text("\n".join(["y,x", *(f"{y},{x}" for x, y in pairs[:13])]), encoding="utf-8")
    Path("plain.csv").write_text("\n".join(["x,y", *(f"{x},{y}" for x, y in pairs[:13])]), encoding="utf-8")
    named = kinds.by_name_data(21).train[0]
    np.savez("named.npz", **named)
    placed = kinds.by_place_data(21).train[0]
    np.savez("placed.npz", *placed)
    return {"named": named, "placed": placed, "table": pairs[:13].astype(np.float32)}


def outputs(run, inputs, *words):
    """Returns what the command writes as an array, after its CSV and JSON were compared with it."""
    files = [f"--out=out{kind}" for kind in (".npz", ".csv", ".json")]
    assert predict.main([f"runs/{run}", inputs, *words, *files, "--top=2"]) == 0
    found = dict(np.load("out.npz"))
    inputs_found, names = found.pop("inputs").tolist(), found.pop("class_names").tolist()
    ((name, array),) = found.items()
    with Path("out.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    listed = json.loads(Path("out.json").read_text(encoding="utf-8"))["predictions"]
    assert [row["input"] for row in rows] == [row["input"] for row in listed] == inputs_found
    if name == "probabilities":
        np.testing.assert_allclose(array.sum(axis=1), 1, rtol=1e-5)
        assert [int(row["class"]) for row in rows] == array.argmax(axis=1).tolist()
        assert not names or [row["name"] for row in rows] == [names[place] for place in array.argmax(axis=1)]
    else:
        titles = list(rows[0])[1:]
        np.testing.assert_allclose([[float(row[title]) for title in titles] for row in rows], array, rtol=1e-5)
    return name, array, inputs_found


def check(run, inputs, arrays, name, model, data, *, table=""):
    """Trains a model; its checkpoint, its export and Python predict the same on any layout, in the order of inputs."""
    tf_ipu_dp.train(model=model, data=data, run_dir=f"runs/{run}", **SMALL)
    code = [f"--model=kinds.py:{model.__name__}"]
    if callable(data):
        code.append(f"--dataset=kinds.py:{data.__name__}")
    found, one, order = outputs(run, inputs, *code, "--ipus=1")
    assert (found, len(one)) == (name, len(order)), found
    _, many, same_order = outputs(run, inputs, *code, "--ipus=8", "--micro_batch_size=2")
    assert same_order == order
    np.testing.assert_allclose(many, one, atol=1e-5)
    own = tf_ipu_dp.open_run(f"runs/{run}").model(model=model, dataset=data if callable(data) else None)
    np.testing.assert_allclose(own.predict(arrays, verbose=0), one, atol=1e-5)
    found, exported, _ = outputs(run, table or inputs, "--ipus=2")  # without the code
    assert found == name, found
    np.testing.assert_allclose(exported, one, atol=1e-5)
    plain = tf_ipu_dp.open_run(f"runs/{run}").model().predict(arrays, verbose=0)
    np.testing.assert_allclose(plain[name], one, atol=1e-5)


def main():
    given = write_inputs()
    images = sorted(Path("pets").rglob("*.png"))
    pixels = np.stack([tf.io.decode_png(path.read_bytes()).numpy() for path in images])
    check("named", "named.npz", given["named"], "probabilities", kinds.by_name, kinds.by_name_data)
    check("placed", "placed.npz", given["placed"], "sums", kinds.by_place, kinds.by_place_data)
    check("words", "in.csv", given["table"], "probabilities", kinds.small, "./words.csv", table="plain.csv")
    # The columns of training are y and x, in this order, which an export does not know.
    check("numbers", "in.csv", given["table"][:, ::-1], "dense", kinds.number, "./numbers.csv", table="swapped.csv")
    check("pets", "pets", pixels, "probabilities", kinds.small, "./pets")
    check("scores", "pets", pixels, "scores", kinds.scores, "./pets")
    last = tf_ipu_dp.open_run("runs/scores").metrics.training[-1]
    assert last.accuracy is None and 0 <= last.metrics["accuracy"] <= 1, last
    shutil.rmtree("runs/named/export")
    for words, sentence in (
        (["named.npz"], "runs/named was trained with --model=kinds.py:by_name, and code is only loaded if you name"),
        (["placed.npz", "--model=kinds.py:by_name", "--dataset=kinds.py:by_name_data"],
         "placed.npz has the shape 21 x 3, but the model takes samples of one int32."),
    ):  # fmt: skip
        try:
            predict.main(["runs/named", *words])
        except tf_ipu_dp.UsageError as error:
            assert str(error).startswith(sentence), error
        else:
            raise AssertionError(words)


if __name__ == "__main__":
    main()
