"""The traced model, which torch alone can load."""

from __future__ import annotations

from pathlib import Path

import torch

from harness.inference.formats import base


class Format(base.ExportFormat):
    suffix, tolerance = ".pt2", 1e-5

    def write(self, subject: base.Exported, path: Path) -> base.Function:
        program = base.traced(subject)
        # Through a file object, since torch.export rejects names that do not end in .pt2.
        with open(path, "wb") as file:
            torch.export.save(program, file)
        with open(path, "rb") as file:
            loaded: base.Function = torch.export.load(file).module()
        return loaded
