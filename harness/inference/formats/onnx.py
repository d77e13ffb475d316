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

        axes = {0: "batch"} | ({} if subject.max_length is None else {1: "length"})
        program = torch.onnx.export(
            base.traced(subject), input_names=[subject.input], output_names=[subject.output], dynamic_shapes=(axes,),
            dynamo=True, verbose=False,
        )  # fmt: skip
        assert program is not None  # with dynamo
        program.save(str(path), external_data=False)
        session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
        return lambda inputs: torch.from_numpy(session.run([subject.output], {subject.input: inputs.numpy()})[0])
