"""The recorded loss curve: thirty steps on the digits at O0 on one CPU thread.

python -m tests.golden.curve            print differences from the recorded curve
python -m tests.golden.curve --record   replace the recorded curve
"""

from __future__ import annotations

import json
import platform
import re
import sys
import tempfile
from pathlib import Path

import torch

FILE = Path(__file__).with_name("digits.json")
STEPS = 30


def machine() -> dict[str, str]:
    """Versions that the last digits of a curve depend on. Kernels depend on the CPU model, too."""
    info = Path("/proc/cpuinfo")
    models = re.findall(r"^model name\s*: (.*)$", info.read_text(), re.M) if info.exists() else [platform.processor()]
    return {
        "torch": torch.__version__,
        "cpu": f"{models[0] if models else platform.machine()}, {torch.backends.cpu.get_cpu_capability()}",
    }


def train(folder: Path) -> list[float]:
    """Train the first steps of configs/digits.yaml at O0 in ``folder``; return the losses."""
    from harness.data import digits
    from tests.end_to_end.experiment import losses
    from tests.ranks import start, wait_for

    digits.write(folder / "digits")
    overrides = [
        f"output={folder}", f"task.train_csv={folder}/digits/train.csv", f"task.eval_csv={folder}/digits/eval.csv",
        f"task.root={folder}/digits", f"data.cache_dir={folder}/cache", "data.num_workers=0", "precision.opt_level=O0",
        "runtime.device=cpu", "train.log_every=1", f"train.max_steps={STEPS}",
    ]  # fmt: skip
    config = Path(__file__).parents[2] / "configs" / "digits.yaml"
    assert wait_for([start(_drive, (str(config), overrides))], 120) == [0]
    return losses(folder / "digits_run")


def _drive(config: str, overrides: list[str]) -> None:
    from harness.cli import main

    raise SystemExit(main(["train", "-c", config, "name=digits_run", *overrides]))


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        curve = train(Path(folder))
    if "--record" in sys.argv:
        FILE.write_text(json.dumps({"machine": machine(), "losses": curve}, indent=1) + "\n")
    recorded = json.loads(FILE.read_text())
    print("recorded on", recorded["machine"], "now on", machine())
    for index, (old, new) in enumerate(zip(recorded["losses"], curve, strict=True)):
        print(f"{index:3d}  {old:.17g}  {new:.17g}  {new - old:+.3g}")


if __name__ == "__main__":
    main()
