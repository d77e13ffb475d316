"""The weights alone; loading them needs the model's code."""

from __future__ import annotations

import json
from pathlib import Path

from harness.inference.formats import base
from harness.runs.files import temporary_for
from harness.runs.weights_file import load_weights, save_weights, with_versions


class Format(base.ExportFormat):
    suffix, tolerance = ".safetensors", 0.0
    note = "the exported file has the same tensors as %s, in float32"

    def write(self, subject: base.Exported, path: Path) -> base.Function:
        tensors = {name: tensor.detach().clone().contiguous() for name, tensor in subject.model.state_dict().items()}
        metadata = {"model": str(subject.facts["name"]), "args": json.dumps(subject.facts["args"])}
        save_weights(tensors, path, metadata, work=temporary_for(path))
        loaded = subject.new().eval()
        loaded.load_state_dict(with_versions(load_weights(path), loaded))
        return loaded
