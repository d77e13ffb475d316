"""The traced model for ONNX Runtime and others."""

from __future__ import annotations

from pathlib import Path

import torch

from harness.inference.formats import base


class Format(base.ExportFormat):
    suffix, tolerance, extra = ".onnx", 1e-4, "onnx"
    packages = ("onnx", "onnxscript", "onnxruntime")

    def write(self, subject: base.Exported, path: Path) -> base.Function:
        import onnxruntime

        names = [subject.input], [subject.output]
        program = torch.onnx.export(
            base.traced(subject), input_names=names[0], output_names=names[1], dynamo=True, verbose=False
        )
        assert program is not None  # with dynamo
        program.save(str(path), external_data=False)
        session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
        return lambda inputs: torch.from_numpy(session.run([subject.output], {subject.input: inputs.numpy()})[0])
