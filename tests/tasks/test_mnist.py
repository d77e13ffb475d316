"""The tasks mnist and fashion_mnist: the images that torchvision reads, and errors for missing files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torchvision import datasets

from harness.config import loader
from harness.config.schema import ModelSection
from harness.errors import ConfigError, DataError
from harness.tasks import fashion_mnist
from harness.tasks.mnist import config
from harness.training.evaluation.sums import Sums
from tests.datasets import write_idx
from tests.fixtures import write_yaml

TASKS = [(config.Task, "mnist"), (fashion_mnist.Task, "fashion_mnist")]


@pytest.fixture(params=TASKS, ids=["mnist", "fashion_mnist"])
def task(request, tmp_path):
    cls, name = request.param
    raw = tmp_path / cls.kind / "raw"
    write_idx(raw, "train", 25)
    write_idx(raw, "t10k", 12)
    return cls(name=name, root=str(tmp_path))


def test_images_equal_torchvision(task):
    opened = task.open(0, None)
    for rows, train in ((opened.train, True), (opened.eval, False)):
        theirs = getattr(datasets, task.kind)(task.root, train=train)
        batch = rows.batch(np.arange(len(theirs)), None)
        assert torch.equal(batch.inputs[:, 0], theirs.data)
        assert torch.equal(batch.targets, theirs.targets)
    assert opened.summary == {
        "train rows": 25, "eval rows": 12, "classes": f"10: {', '.join(opened.classes)}", "loss": "cross_entropy",
        "metrics": "top1, loss, mean_class_accuracy",
    }  # fmt: skip
    assert opened.label_counts(0, 25).tolist() == [3] * 5 + [2] * 5
    assert opened.notes == []

    expected = {"mnist": ("0", "9"), "fashion_mnist": ("T-shirt/top", "Ankle boot")}
    assert (opened.classes[0], opened.classes[9]) == expected[task.name]


def test_transforms(task):
    """Reproducible for each seed, epoch and row; always 28x28; the list for evaluation apart."""
    rows, mirror = np.arange(12), {"RandomHorizontalFlip": 1.0}
    lists = {"train": [{"RandomCrop": {"size": 28, "padding": 4}}, {"RandomErasing": {"p": 1.0}}], "eval": [mirror]}

    def opened(seed=0, **lists):
        return type(task)(name=task.name, root=task.root, transforms=lists).open(seed, None)

    plain, changed = opened(), opened(**lists)
    first = changed.train.batch(rows, 3)
    assert (first.inputs.dtype, first.inputs.shape) == (torch.uint8, (12, 1, 28, 28))
    assert torch.equal(first.targets, plain.train.batch(rows, 3).targets)
    assert torch.equal(changed.train.batch(rows[[5, 2]], 3).inputs, first.inputs[[5, 2]])
    for other in (changed.train.batch(rows, 4), opened(1, **lists).train.batch(rows, 3), plain.train.batch(rows, 3)):
        assert not torch.equal(other.inputs, first.inputs)
    assert torch.equal(changed.eval.batch(rows, None).inputs, plain.eval.batch(rows, None).inputs.flip(3))
    assert changed.signature["preprocessing"]["transforms"] == [mirror]
    assert changed.fingerprint == plain.fingerprint
    assert opened(train=[{"RandomResizedCrop": 14}]).train.batch(rows, 0).inputs.shape == (12, 1, 28, 28)

    floats = [{"ToDtype": {"dtype": "float32", "scale": True}}, {"Normalize": {"mean": [task.mean], "std": [task.std]}}]
    normal, example = opened(train=floats, eval=floats), plain.eval.batch(rows, None).inputs
    torch.testing.assert_close(normal.prepare(normal.eval.batch(rows, None).inputs), plain.prepare(example))
    with pytest.raises(ConfigError, match="the transforms return float32 in training but uint8 in evaluation"):
        opened(train=floats)
    with pytest.raises(ConfigError, match="task.transforms.train.0: unknown transform 'RandomCropp'"):
        opened(train=["RandomCropp"])


def test_row_limits(task):
    opened = type(task)(name=task.name, root=task.root, train_rows=7, eval_rows=50).open(0, None)
    assert (len(opened.train), len(opened.eval)) == (7, 12)


def test_fingerprint_depends_on_the_images(task):
    first = task.open(0, None).fingerprint
    assert task.open(1, None).fingerprint == first
    path = Path(task.root) / task.kind / "raw" / "t10k-images-idx3-ubyte"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    assert task.open(0, None).fingerprint != first


def test_model_loss_and_report(task):
    opened = task.open(0, None)
    name = {"mnist": "mnist_net", "fashion_mnist": "fashion_cnn"}[task.name]
    with pytest.raises(ConfigError, match=r"Flatten returns \(2, 784\) for 2 rows, not 10 outputs for each"):
        opened.model(ModelSection(name="torch.nn.Flatten"))
    model = opened.model(ModelSection(name=name))
    batch = opened.train.batch(np.arange(4), 0)
    inputs = opened.prepare(batch.inputs)
    expected = (batch.inputs.float() / 255 - task.mean) / task.std
    torch.testing.assert_close(inputs, expected)
    outputs = model(inputs)
    assert opened.loss(outputs, batch.targets).item() == pytest.approx(np.log(10), abs=0.7)
    sums = Sums()
    sums.add(opened.evaluate(torch.eye(10)[[0, 1, 2, 4]] * 9, batch.targets))
    report = opened.report(sums)
    assert set(task.metrics) <= set(report)
    assert report["top1"] == 0.75
    assert list(report["class_accuracy"]) == list(opened.classes)
    table = opened.predictions(torch.eye(10)[[3, 4]] * 9)
    assert table["prediction"] == [opened.classes[3], opened.classes[4]]
    assert len(table) == 11
    assert opened.known(np.array([11, 0])) == {"id": [11, 0], "label": [opened.classes[1], opened.classes[0]]}
    assert opened.signature["preprocessing"]["size"] == [28, 28]


def test_missing_images_name_the_download_command(task, tmp_path):
    absent = type(task)(name=task.name, root=str(tmp_path / "none"))
    with pytest.raises(DataError) as caught:
        absent.open(0, None)
    assert f"type: harness data {task.name} {tmp_path}/none" in str(caught.value)


@pytest.mark.slow
def test_mean_and_std_are_those_of_the_training_images(shared_data, tmp_path):
    from harness.tools.data import published

    for cls, name in TASKS:
        getattr(published, name)(tmp_path / name, str(shared_data / name))
        task = cls(name=name, root=str(tmp_path / name))
        pixels = np.asarray(task.open(0, None).train.inputs) / np.float32(255)
        assert pixels.mean() == pytest.approx(task.mean, abs=1e-4)
        assert pixels.std() == pytest.approx(task.std, abs=1e-4)


@pytest.mark.parametrize(
    "settings", [{"task": {"root": "s3://bucket/mnist"}}, {"data": {"cache_dir": "s3://bucket/cache"}}]
)
def test_a_url_is_refused_where_only_a_folder_works(tmp_path, settings):
    """It would be read as a folder called s3:."""
    tree = {"name": "x", "task": {"name": "mnist"}, "batch": {"global": 8}}
    for section, values in settings.items():
        tree[section] = {**tree.get(section, {}), **values}
    with pytest.raises(ConfigError, match="write a path on this machine; a URL is not supported here"):
        loader.load(str(write_yaml(tmp_path / "x.yaml", tree)), [])


def test_labels_that_do_not_match_the_images(task):
    file = Path(task.root) / task.kind / "raw" / "t10k-labels-idx1-ubyte"
    content = file.read_bytes()
    file.write_bytes(content[:-1] + b"\x0a")
    with pytest.raises(DataError, match="a label is 10; labels are 0 to 9"):
        task.open(0, None)
    file.write_bytes(content[:4] + (11).to_bytes(4, "big") + content[8:-1])
    with pytest.raises(DataError, match="11 labels for 12 images"):
        task.open(0, None)
