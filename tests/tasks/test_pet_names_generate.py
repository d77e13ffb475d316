"""Generated names: new, reproducible, distributed as in the model; and the errors."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
import yaml
from safetensors.torch import load_file

from harness import cli
from harness.config import loader
from harness.data.names import ALPHABET
from harness.errors import CheckpointError, ConfigError, DataError, HarnessError
from harness.runs import ownership
from harness.runs.weights_file import save_weights
from harness.tasks.pet_names import generate
from harness.tasks.pet_names.coded import STOP_CODE, encode
from harness.tasks.pet_names.generate import MAX_LENGTH, NameRequest
from tests.datasets import NAMES, write_names
from tests.fixtures import settings, write_rows

SIZE = len(ALPHABET)


class Table(torch.nn.Module):
    """The next character depends only on the last one, so that the names are predictable."""

    def __init__(self, num_characters: int) -> None:
        super().__init__()
        self.logits = torch.nn.Parameter(torch.full((num_characters, num_characters), -1e4))

    def forward(self, codes):
        return self.logits[codes]


def chain(**follows: dict[str, float]) -> torch.Tensor:
    """Logits of {character: {next: probability}}; "blank" is the start of a name."""
    logits = torch.full((SIZE, SIZE), -1e4)
    for before, after in follows.items():
        row = encode("*" if before == "blank" else before)[0]
        for character, probability in after.items():
            logits[row, encode(character)[0]] = torch.tensor(probability).log()
    return logits


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Writes a run folder of a Table with the given logits, as a start of this user would; returns its path."""
    monkeypatch.setenv("APEX_HARNESS_CACHE", str(tmp_path / "cache"))

    def write(logits: torch.Tensor, rows: str = "windows", model: str = "tests.tasks.test_pet_names_generate.Table"):
        folder = tmp_path / "runs" / "pets"
        folder.mkdir(parents=True, exist_ok=True)
        names = write_names(tmp_path / "names.txt")
        task = {"name": "pet_names", "names": str(names), "rows": rows, "window": 3}
        config = {"name": "pets", "task": task, "model": {"name": model}, "batch": {"global": 8}}
        (folder / "config.yaml").write_text(yaml.safe_dump(config))
        ownership.remember(yaml.safe_dump(config))
        save_weights({"logits": logits}, folder / "weights.safetensors", {}, tmp_path / "work")
        return folder

    return write


LETTERS = chain(
    blank={"a": 0.5, "b": 0.25, "l": 0.25}, a={"b": 0.5, "+": 0.5}, b={"a": 0.5, "+": 0.5}, l={"u": 1.0},
    u={"c": 0.5, "n": 0.5}, c={"y": 1.0}, n={"a": 1.0}, y={"+": 1.0},
)  # fmt: skip


@pytest.mark.parametrize("rows", ["windows", "names"])
def test_new_names_all_different(run, rows):
    found = list(generate.names(run(LETTERS, rows), NameRequest(12)))
    assert len(set(found)) == 12
    assert all(name.istitle() for name in found)
    assert not {name.lower() for name in found} & set(NAMES)
    assert {"A", "B", "Ab", "Ba"} < set(found)


def test_keep_existing(run):
    folder = run(chain(blank={"l": 1.0}, l={"u": 1.0}, u={"c": 1.0}, c={"y": 1.0}, y={"+": 0.5, "y": 0.5}))
    assert "Lucy" not in list(generate.names(folder, NameRequest(4)))
    assert "Lucy" in list(generate.names(folder, NameRequest(4, keep_existing=True)))
    (folder.parent.parent / "names.txt").unlink()
    assert len(list(generate.names(folder, NameRequest(4, keep_existing=True)))) == 4  # needs no list then
    with pytest.raises(DataError, match="or add --keep-existing"):
        list(generate.names(folder, NameRequest(4)))


def test_a_seed_gives_the_same_names(run):
    folder = run(LETTERS)
    ten, fifteen = (list(generate.names(folder, NameRequest(num, seed=3))) for num in (10, 15))
    assert fifteen[:10] == ten
    assert list(generate.names(folder, NameRequest(10, seed=4))) != ten
    assert len(list(generate.names(folder, NameRequest(1, seed=-(10**30))))) == 1  # any integer


def test_names_follow_the_distribution_of_the_model(run):
    """Short names do not come first, and a low temperature sharpens the distribution."""
    folder = run(LETTERS)
    task = loader.load(folder / "config.yaml").task
    model = Table(SIZE)
    model.load_state_dict(load_file(folder / "weights.safetensors"))

    def shares(temperature: float) -> list[float]:
        rng = torch.Generator().manual_seed(0)
        texts = [text for _ in range(40) for text in generate.sample(task, model, "", temperature, rng)]
        first = Counter(text[0] for text in texts)
        return [first[letter] / len(texts) for letter in "abl"]

    assert shares(1.0) == pytest.approx([0.5, 0.25, 0.25], abs=0.03)
    assert shares(0.5) == pytest.approx([4 / 6, 1 / 6, 1 / 6], abs=0.03)
    texts = generate.sample(task, model, "", 1.0, torch.Generator().manual_seed(0))
    lengths = [len(text) for text in texts]
    assert lengths != sorted(lengths)


def test_endless_names_and_padding_are_left_out(run):
    """From a model that never ends a name, and from one that puts padding into names."""
    folder = run(chain(blank={"z": 1.0}, z={"z": 0.999, "+": 0.001}))
    found = []
    with pytest.raises(HarnessError, match=r"found only \d+ of 60 names in \d+ tries") as caught:
        found.extend(generate.names(folder, NameRequest(60)))
    assert "--temperature" in caught.value.hint
    assert caught.value.exit_code == 70
    assert all(len(name) <= MAX_LENGTH for name in found)
    endless = chain(blank={"z": 1.0}, z={"z": 1.0})
    with pytest.raises(HarnessError, match="only 0 of 1"):
        list(generate.names(run(endless), NameRequest(1)))
    blanks = torch.zeros(SIZE, SIZE)
    blanks[:, 0] = 50.0
    blanks[:, STOP_CODE] = 2.0
    assert not any("*" in name for name in generate.names(run(blanks), NameRequest(5)))


@pytest.mark.parametrize("start", ["Be", "be", "  B", "Mr. B-", ""])
def test_start(run, start):
    even = torch.zeros(SIZE, SIZE)
    even[:, STOP_CODE] = 2.0
    found = list(generate.names(run(even), NameRequest(8, start=start)))
    assert all(name.lower().startswith(start.strip().lower()) for name in found)


def test_errors(run, tmp_path):
    folder = run(LETTERS)

    def refused(error, request=None, path=folder) -> str:
        with pytest.raises(error) as caught:
            list(generate.names(path, request or NameRequest(1)))
        return str(caught.value)

    assert "characters that are not in any name: 7 é" in refused(ConfigError, NameRequest(1, start="é7a"))
    assert "not in any name: * +" in refused(ConfigError, NameRequest(1, start="a+*"))
    assert f"40 characters, but a name has at most {MAX_LENGTH}" in refused(ConfigError, NameRequest(1, start="a" * 40))
    assert "there is no such folder" in refused(ConfigError, path=tmp_path / "none")
    (folder / "weights.safetensors").write_bytes(b"half")
    assert "the best weights cannot be read" in refused(CheckpointError)
    save_weights({"other": torch.zeros(1)}, folder / "weights.safetensors", {}, tmp_path / "work")
    assert "the weights do not fit this model" in refused(CheckpointError)
    write_rows(tmp_path, "train", 3)
    (folder / "config.yaml").write_text(yaml.safe_dump(settings(tmp_path)))
    assert "the task image_csv cannot generate names" in refused(ConfigError)
    (folder / "weights.safetensors").unlink()
    assert "this run has no weights yet" in refused(ConfigError)


def test_command(run, capsys):
    folder = str(run(LETTERS))
    assert cli.main(["generate", folder, "-n", "3", "--temperature", "1.5", "--seed", "7", "--start", "A"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out == list(generate.names(run(LETTERS), NameRequest(3, 1.5, 7, "A")))
    assert cli.main(["generate", folder, "--keep-existing", "-n", "1"]) == 0
    assert cli.main(["generate", folder, "--start", "é"]) == 2
    assert cli.main(["generate", folder, "-n", "3", "--start", "lucyy"]) == 70
    assert "only 1 of 3" in capsys.readouterr().err
    for words in (["-n", "0"], ["-n", "x"], ["--temperature", "0"], ["--temperature", "inf"], ["--temperature", "nan"]):
        with pytest.raises(SystemExit) as stop:
            cli.main(["generate", folder, *words])
        assert stop.value.code == 2
        assert "invalid positive" in capsys.readouterr().err
