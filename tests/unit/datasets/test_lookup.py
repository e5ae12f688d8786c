from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any, Dict, Optional, Sequence

import pytest

from tf_ipu_dp import cli
from tf_ipu_dp.datasets import lookup
from tf_ipu_dp.datasets.info import DATASETS

IMAGE = {"image": {"shape": {"dimensions": ["20", "30", "3"]}, "dtype": "uint8", "encodingFormat": "png"}}
LABEL = {"classLabel": {"numClasses": "7"}}
TEXT = {"text": {}}


def write_set(
    data_dir: Path,
    path: str,
    *,
    splits: Optional[Dict[str, Sequence[int]]] = None,
    features: Optional[Dict[str, Any]] = None,
    supervised: Sequence[str] = ("image", "label"),
    **info: Any,
) -> Path:
    """Writes the two files as tensorflow-datasets 4.9 does, without the images."""
    folder = data_dir / path
    folder.mkdir(parents=True)
    shards = splits if splits is not None else {"train": [30, 31], "test": [9]}
    listed = [{"name": name, "shardLengths": [str(n) for n in lengths]} for name, lengths in shards.items()]
    keys = {"tuple": {"items": [{"featureKey": key} for key in supervised]}}
    text = json.dumps({"fileFormat": "tfrecord", "splits": listed, "supervisedKeys": keys, **info})
    (folder / "dataset_info.json").write_text(text)
    columns = {"featuresDict": {"features": features or {"image": IMAGE, "label": LABEL}}}
    (folder / "features.json").write_text(json.dumps(columns))
    return folder


def image(*dimensions: int, dtype: str = "uint8") -> Dict[str, Any]:
    return {"image": {"shape": {"dimensions": [str(size) for size in dimensions]}, "dtype": dtype}}


def refusal(name: str, data_dir: Path) -> str:
    with pytest.raises(cli.UsageError) as caught:
        lookup.find(name, str(data_dir), None)
    assert len(caught.value.sentences) == 1
    return caught.value.sentences[0]


@pytest.mark.parametrize("name", DATASETS)
def test_known_sets_are_planned_with_their_published_facts_before_they_are_there(name, tmp_path):
    assert lookup.find(name, str(tmp_path), None) == DATASETS[name]


def test_image_size_replaces_height_and_width_alone(tmp_path):
    expected = dataclasses.replace(DATASETS["cifar10"], height=64, width=64)
    assert lookup.find("cifar10", str(tmp_path), 64) == expected


def test_the_facts_of_other_sets_are_read_from_what_was_prepared(tmp_path):
    write_set(tmp_path, "fruit/1.0.0")
    facts = lookup.find("fruit", str(tmp_path), None)
    assert (facts.name, facts.train_samples, facts.validation_samples) == ("fruit", 61, 9)
    assert (facts.height, facts.width, facts.channels, facts.classes) == (20, 30, 3, 7)
    assert (len(facts.mean), len(facts.deviation), facts.streamed, facts.augment) == (3, 3, False, "none")


def test_the_newest_version_is_taken_unless_one_is_named(tmp_path):
    for version, samples in (("2.0.0", 2), ("10.0.0", 10), ("9.5.0", 9)):
        write_set(tmp_path, f"fruit/{version}", splits={"train": [samples], "test": [1]})
    assert lookup.find("fruit", str(tmp_path), None).train_samples == 10
    assert lookup.find("fruit:9.5.0", str(tmp_path), None).train_samples == 9
    assert "was not found" in refusal("fruit:3.0.0", tmp_path)


def test_a_configuration_is_named_or_is_the_only_one(tmp_path):
    write_set(tmp_path, "fruit/ripe/1.0.0", splits={"train": [5], "test": [1]})
    assert lookup.find("fruit", str(tmp_path), None).train_samples == 5
    write_set(tmp_path, "fruit/raw/1.0.0", splits={"train": [6], "test": [1]})
    assert lookup.find("fruit/raw", str(tmp_path), None).train_samples == 6
    assert lookup.find("fruit/raw:1.0.0", str(tmp_path), None).train_samples == 6
    assert refusal("fruit", tmp_path).endswith("Use --dataset=fruit/raw or --dataset=fruit/ripe.")


def test_a_known_set_keeps_its_recipe_and_takes_its_counts_from_what_is_there(tmp_path):
    write_set(tmp_path, "cifar10/3.0.2", features={"image": image(32, 32, 3), "label": LABEL})
    facts = lookup.find("cifar10", str(tmp_path), None)
    assert (facts.train_samples, facts.classes) == (61, 7)
    known = DATASETS["cifar10"]
    assert (facts.mean, facts.deviation, facts.augment) == (known.mean, known.deviation, known.augment)


def test_sets_with_images_of_many_sizes_are_streamed_at_224_pixels(tmp_path):
    write_set(tmp_path, "photos/1.0.0", features={"image": image(-1, -1, 3), "label": LABEL})
    facts = lookup.find("photos", str(tmp_path), None)
    assert (facts.height, facts.width, facts.streamed, facts.augment) == (224, 224, True, "imagenet")
    assert lookup.find("photos", str(tmp_path), 96).height == 96


@pytest.mark.parametrize(("samples", "streamed"), [(2**31 // (64 * 64 * 3), False), (2**31 // (64 * 64 * 3) + 1, True)])
def test_sets_of_more_than_two_gibibytes_are_streamed(samples, streamed, tmp_path):
    features = {"image": image(64, 64, 3), "label": LABEL}
    write_set(tmp_path, "many/1.0.0", splits={"train": [samples - 1], "test": [1]}, features=features)
    assert lookup.find("many", str(tmp_path), None).streamed is streamed


def test_validation_is_the_test_split_or_else_the_validation_split(tmp_path):
    write_set(tmp_path, "both/1.0.0", splits={"train": [4], "validation": [3], "test": [2]})
    write_set(tmp_path, "one/1.0.0", splits={"train": [4], "validation": [3]})
    assert lookup.find("both", str(tmp_path), None).validation_samples == 2
    assert lookup.find("one", str(tmp_path), None).validation_samples == 3
    write_set(tmp_path, "none/1.0.0", splits={"train": [4]})
    assert "has the splits train; training takes a train split" in refusal("none", tmp_path)


def test_image_and_label_are_found_under_other_names(tmp_path):
    columns = {"mask": IMAGE, "picture": IMAGE, "kind": LABEL, "note": TEXT}
    write_set(tmp_path, "fruit/1.0.0", features=columns, supervised=("picture", "kind"))
    prepared = lookup.read_prepared("fruit", str(tmp_path))
    assert prepared and (prepared.image_key, prepared.label_key) == ("picture", "kind")


def test_classes_are_counted_by_their_names_where_no_number_is_given(tmp_path):
    folder = write_set(tmp_path, "fruit/1.0.0", features={"image": IMAGE, "label": {"classLabel": {}}})
    (folder / "label.labels.txt").write_text("apple\npear\nplum\n")
    found = lookup.find("fruit", str(tmp_path), None)
    assert (found.classes, found.class_names) == (3, ("apple", "pear", "plum"))


@pytest.mark.parametrize(
    ("features", "words"),
    [
        ({"text": TEXT, "label": LABEL}, "is not an image classification: it has no images, only text, label."),
        ({"image": IMAGE, "text": TEXT}, "is not an image classification: it has no class labels, only image, text."),
        ({"image": image(20, 20, 1, dtype="uint16"), "label": LABEL}, "has images of uint16; only 8-bit ones"),
    ],
)
def test_sets_that_are_no_image_classification_are_refused_by_name(features, words, tmp_path):
    folder = write_set(tmp_path, "other/1.0.0", features=features)
    text = refusal("other", tmp_path)
    assert text.startswith(f"--dataset=other in {folder} ") and words in text


def test_another_file_format_is_refused(tmp_path):
    write_set(tmp_path, "other/1.0.0", fileFormat="array_record")
    assert "is stored as array_record. Prepare it with file_format='tfrecord'." in refusal("other", tmp_path)


def test_a_damaged_description_is_named(tmp_path):
    folder = write_set(tmp_path, "fruit/1.0.0")
    (folder / "dataset_info.json").write_text('{"splits": [')
    assert f"--dataset=fruit cannot be read: {folder} does not have the files" in refusal("fruit", tmp_path)


def test_a_missing_set_is_refused_with_the_place_and_the_command(tmp_path):
    assert refusal("fruit", tmp_path) == (
        f'--dataset=fruit was not found in {tmp_path}. Prepare it with python -c "import tensorflow_datasets as tfds; '
        f"tfds.builder('fruit', data_dir='{tmp_path}').download_and_prepare()\", "
        "or give the folder that has it with --data_dir."
    )


def test_a_likely_typo_is_answered_with_the_nearest_name(tmp_path):
    write_set(tmp_path, "vegetables/1.0.0")
    assert "Did you mean --dataset=cifar10?" in refusal("cifar_10", tmp_path)
    assert "Did you mean --dataset=vegetables?" in refusal("vegetable", tmp_path)
    assert "Did you mean" not in refusal("quite_other", tmp_path)


def test_the_folder_is_the_flag_then_the_variable_then_the_home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("TFDS_DATA_DIR", raising=False)
    assert lookup.data_folder(None) == tmp_path / "tensorflow_datasets"
    monkeypatch.setenv("TFDS_DATA_DIR", "~/sets")
    assert lookup.data_folder(None) == tmp_path / "sets"
    assert lookup.data_folder("elsewhere") == Path("elsewhere")


def test_looking_a_set_up_imports_neither_tensorflow_nor_numpy():
    code = (
        "import sys; from tf_ipu_dp.datasets import lookup; lookup.find('mnist', None, None);"
        "sys.exit(bool({'tensorflow', 'tensorflow_datasets', 'numpy'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
