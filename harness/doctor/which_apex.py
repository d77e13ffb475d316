"""Which package an ``import apex`` would find, told from its files and metadata: PyPI's cannot even be imported."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from harness.doctor.findings import Finding, Place

_PARTS = [
    *("amp", "parallel", "optimizers", "normalization", "multi_tensor_apply"),
    *("fp16_utils", "mlp", "fused_dense", "contrib", "transformer"),
]
_EXTENSIONS = ["apex_C", "amp_C", "syncbn", "fused_layer_norm_cuda"]
_SCRIPTS = "python -m harness.apex SCRIPT ARGS  # runs a script that says `from apex import amp` as it is"

Kind = Literal["none", "ours", "nvidia", "rocm", "pypi", "folder", "unknown"]


@dataclass(frozen=True)
class Apex:
    """An installed ``apex``: whose it is, its version, folder and parts."""

    kind: Kind
    version: str = "of unknown version"
    folder: str = ""
    parts: tuple[str, ...] = ()

    @property
    def has_amp(self) -> bool:
        return "amp" in self.parts and "parallel" in self.parts


def find() -> Apex:
    """The ``apex`` that an import would find now."""
    if getattr(sys.modules.get("apex"), "__harness__", False):
        return Apex("ours")
    try:
        spec = importlib.util.find_spec("apex")
    except (ImportError, ValueError):  # one half imported, without a spec
        spec = None
    if spec is None:
        return Apex("none")
    places = list(spec.submodule_search_locations or [])
    folder = Path(places[0] if places else spec.origin or "")
    version, requirements = _metadata()
    parts = tuple(part for part in _PARTS if (folder / part).is_dir() or (folder / f"{part}.py").is_file())
    kind: Kind
    if "multi_tensor_apply" in parts or "amp" in parts:
        kind = "rocm" if _is_rocm(folder, version) else "nvidia"
    elif spec.origin is None:
        kind = "folder"
    else:
        kind = "pypi" if "pyramid" in requirements else "unknown"
    return Apex(kind, version, str(folder), parts)


def _metadata() -> tuple[str, str]:
    """(version, requirements in lower case) of the distribution named apex."""
    try:
        distribution = importlib.metadata.distribution("apex")
    except importlib.metadata.PackageNotFoundError:
        return "of unknown version", ""
    return distribution.version, " ".join(distribution.requires or []).lower()


def _is_rocm(folder: Path, version: str) -> bool:
    """ROCm's has annotations for bfloat16, which NVIDIA's never had."""
    exports = folder / "amp" / "__init__.py"
    text = exports.read_text(encoding="utf-8", errors="replace") if exports.is_file() else ""
    return "bfloat16_function" in text or "rocm" in version


def apex(place: Place) -> Iterator[Finding]:
    found = find()
    at = f"{found.version}, in {found.folder}"
    if found.kind == "none":
        yield Finding("apex", "ok", "none is installed, and none is needed")
    elif found.kind == "ours":
        yield Finding("apex", "ok", "harness.apex itself, by its install()")
    elif found.kind == "pypi":
        text = f"PyPI's apex {at}: a toolkit for the Pyramid web framework that cannot be imported, not NVIDIA's Apex"
        yield Finding("apex", "problem", text, ("python -m pip uninstall apex", _SCRIPTS))
    elif found.kind == "folder":
        text = f"a mere folder of that name, {found.folder}, hides any other (a clone of NVIDIA's repository?)"
        yield Finding("apex", "note", text, (f"mv {found.folder} {found.folder}-source", _SCRIPTS))
    elif found.kind == "unknown":
        yield Finding("apex", "note", f"a package that is not NVIDIA's Apex: {at}", ("python -m pip uninstall apex",))
    else:
        yield from _genuine(found, at)


def _genuine(found: Apex, at: str) -> Iterator[Finding]:
    whose = {"nvidia": "NVIDIA's", "rocm": "ROCm's"}[found.kind]
    extensions = [name for name in _EXTENSIONS if importlib.util.find_spec(name) is not None]
    text = f"{whose} {at}; has {', '.join(found.parts)}; extensions: {', '.join(extensions) or 'none were built'}"
    if found.has_amp:
        yield Finding("apex", "ok", text)
    else:
        absent = " and ".join(part for part in ("amp", "parallel") if part not in found.parts)
        yield Finding("apex", "note", f"{text}; no {absent}, which NVIDIA removed after 25.05", (_SCRIPTS,))


def backend(place: Place) -> Iterator[Finding]:
    """What ``precision.backend: auto`` takes. Only an Apex that has amp is imported for the answer."""
    import torch

    from harness.config.schema import PrecisionSection
    from harness.training import precision

    on_cuda = torch.cuda.is_available()
    device = torch.device("cuda" if on_cuda and find().has_amp else "cpu")
    chosen = precision.choose(PrecisionSection(), device).backend
    why = "" if on_cuda else " (on the CPU it always does)"
    yield Finding("backend", "ok", f"precision.backend=auto uses {chosen}{why}")
