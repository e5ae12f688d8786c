from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tf_ipu_dp import cli
from tf_ipu_dp.datasets import info
from tf_ipu_dp.prediction import inputs
from tf_ipu_dp.prediction.inputs import InputFile, InputReader, InputSpec

GREY = InputSpec("image", (4, 4, 1), "uint8")
TWO = (InputSpec("age", (1,), "float32"), InputSpec("text", (8,), "int32"))


def decode(content):
    """Stands for what decodes images: a file of these tests has one number, the colour of all pixels."""
    if not content:
        raise ValueError("not an image")
    return np.full((4, 4, 1), content[0], np.uint8)


def read(files, size=3, specs=(GREY,), skip_bad=False):
    reader = InputReader(specs, decode, skip_bad=skip_bad)
    return reader, list(reader.read(files, size))


@given(st.lists(st.one_of(st.none(), st.integers(0, 7)), min_size=1, max_size=8), st.integers(1, 9))
def test_every_sample_is_read_once_and_in_order_whatever_the_size_of_the_parts(tmp_path_factory, kinds, size):
    folder = tmp_path_factory.mktemp("inputs")
    expected, files, colour = [], [], 0
    for number, rows in enumerate(kinds):
        if rows is None:
            path = folder / f"{number}.png"
            path.write_bytes(bytes([colour + 1]))
            expected.append((str(path), colour + 1))
            colour += 1
        else:
            path = folder / f"{number}.npy"
            np.save(
                path,
                np.arange(colour + 1, colour + 1 + rows, dtype=np.uint8)[:, None, None] + np.zeros((4, 4), np.uint8),
            )
            expected += [(f"{path}[{row}]", colour + 1 + row) for row in range(rows)]
            colour += rows
        files.append(path)
    if not expected:
        with pytest.raises(cli.UsageError, match="there is no sample in it"):
            inputs.find_files(list(map(str, files)), [GREY])
        return
    _, parts = read(inputs.find_files(list(map(str, files)), [GREY]), size)
    found = [(name, int(image[0, 0, 0])) for part in parts for name, image in zip(part.names, part.arrays["image"])]
    assert found == expected
    assert all(len(part.names) == size for part in parts[:-1]) and 0 < len(parts[-1].names) <= size


def test_a_folder_is_read_in_the_order_of_its_paths(tmp_path):
    for name in ("b/1.png", "a/2.PNG", "a/10.jpg", ".hidden/0.png", "a/notes.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"\x05")
    (tmp_path / "loop").symlink_to(tmp_path)
    found = inputs.find_files([str(tmp_path)], [GREY])
    assert [str(each.path.relative_to(tmp_path)) for each in found] == ["a/10.jpg", "a/2.PNG", "b/1.png"]


def test_images_that_cannot_be_decoded_are_named_and_counted_or_left_out(tmp_path):
    for number in range(6):
        (tmp_path / f"{number}.png").write_bytes(b"" if number else b"\x01")
    files = inputs.find_files([str(tmp_path)], [GREY])
    with pytest.raises(cli.UsageError) as caught:
        read(files, 6)
    named = ", ".join(f"{tmp_path / f'{number}.png'} (not an image)" for number in (1, 2, 3))
    assert str(caught.value) == (
        f"5 images cannot be decoded: {named} and 2 more. Remove them, or add --skip_bad_samples, which leaves them "
        "out."
    )
    reader, parts = read(files, 6, skip_bad=True)
    assert [part.names for part in parts] == [[str(tmp_path / "0.png")]] and len(reader.skipped) == 5


@pytest.mark.parametrize("shape", [(4, 4), (4, 4, 1), (2, 4, 4), (2, 4, 4, 1)])
def test_an_array_may_be_one_image_and_grey_images_need_no_channel(tmp_path, shape):
    np.save(tmp_path / "a.npy", np.zeros(shape, np.uint8))
    (found,) = inputs.find_files([str(tmp_path / "a.npy")], [GREY])
    assert found == InputFile(tmp_path / "a.npy", 2 if shape[0] == 2 else 1, is_image=False)


def test_a_model_of_several_inputs_takes_their_arrays_by_name(tmp_path):
    np.savez(tmp_path / "a.npz", age=np.ones((5, 1)), text=np.ones((5, 8), np.int64), other=np.ones(3))
    files = inputs.find_files([str(tmp_path / "a.npz")], TWO)
    _, parts = read(files, 4, TWO)
    assert [{name: (array.shape, str(array.dtype)) for name, array in part.arrays.items()} for part in parts] == [
        {"age": ((4, 1), "float32"), "text": ((4, 8), "int32")},
        {"age": ((1, 1), "float32"), "text": ((1, 8), "int32")},
    ]


@pytest.mark.parametrize(
    ("name", "arrays", "specs", "sentence"),
    [
        ("a.npy", np.zeros((3, 5, 5, 1), np.uint8), [GREY], "has the shape 3 x 5 x 5 x 1, but the model takes samples "
         "of 4 x 4 x 1 uint8. Give an array with a row for each sample."),
        ("a.npy", np.zeros((3, 4, 4, 1)), [GREY], "is of type float64, but the model takes 4 x 4 x 1 uint8. Convert it "
         "with array.astype('uint8'), with pixels from 0 to 255."),
        ("a.npy", np.array([{}]), [GREY], "cannot be read as an array ("),
        ("a.npz", {"p": np.zeros(3), "q": np.zeros(3)}, [GREY], "has the arrays p, q, and it is not clear which to "
         "take. Call it image."),
        ("a.npz", {"age": np.zeros((3, 1))}, TWO, "has no array text. A model of 2 inputs takes a .npz file with the "
         "arrays age, text."),
        ("a.npz", {"age": np.zeros((3, 1)), "text": np.zeros((4, 8), np.int32)}, TWO, "has arrays of different "
         "lengths: age 3, text 4. Each needs one row per sample."),
        ("a.png", b"\x01", TWO, "is an image, but the model takes no image (age: 1 float32; text: 8 int32). Give a "
         ".npz or .npy file."),
        ("a.npy", b"\x93NUMPY", [GREY], "cannot be read as an array"),
        ("a.txt", b"x", [GREY], "is of a type that cannot be read. Types are: .png, .jpg"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_with_what_would(tmp_path, name, arrays, specs, sentence):
    path = tmp_path / name
    if isinstance(arrays, bytes):
        path.write_bytes(arrays)
    elif isinstance(arrays, dict):
        np.savez(path, **arrays)
    else:
        np.save(path, arrays)
    with pytest.raises(cli.UsageError) as caught:
        inputs.find_files([str(path)], specs)
    assert str(caught.value).startswith(f"{path} {sentence}")


def test_what_is_not_there_is_refused(tmp_path):
    with pytest.raises(cli.UsageError, match="There is no file"):
        inputs.find_files([str(tmp_path / "a.png")], [GREY])
    with pytest.raises(cli.UsageError, match="has no input in it"):
        inputs.find_files([str(tmp_path)], [GREY])


def test_a_part_of_large_images_has_fewer_of_them():
    (large,) = inputs.image_specs(info.DATASETS["imagenet2012"])
    assert inputs.most_samples([GREY]) > 100 * inputs.most_samples([large]) > 100
