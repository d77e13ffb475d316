"""Times the training steps of a configuration on one batch, without a loader; rank 0 prints rows per second.

python -m benchmarks.steps -c configs/digits.yaml --steps 30 [key=value ...]
torchrun --nproc-per-node 2 -m benchmarks.steps -c configs/digits.yaml
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from harness.config import loader
from harness.config.schema import Config
from harness.distributed.launch_env import detect
from harness.distributed.process_group import open_runtime
from harness.distributed.runtime import Runtime
from harness.distributed.stop import Stop
from harness.errors import plural
from harness.runs.run_dir import RunFolder
from harness.training import build, loop
from harness.training.optimizer import emulated_half
from harness.training.run import Run

WARM_UP = 3


@contextmanager
def opened(config: Config, folder: Path, runtime: Runtime) -> Iterator[Run]:
    """The run of ``config``, with its files in ``folder``."""
    where = RunFolder(folder, keep=1)
    where.checkpoints.folder.mkdir(parents=True)
    with emulated_half.half_on_cpu(config.precision, runtime.device):
        run = build.build(config, runtime, where, Stop(runtime))
        try:
            yield run
        finally:
            run.close()


def rows_per_s(run: Run, num_steps: int) -> float:
    """Rows of all ranks per second of this rank, over the fastest half of the steps."""
    group = next(run.train_data.groups(0, []))
    run.parallel.model.train()
    seconds = []
    for _ in range(WARM_UP + num_steps):
        start = time.perf_counter()
        loop.step(run, group)
        if run.runtime.device.type == "cuda":
            torch.cuda.synchronize(run.runtime.device)
        seconds.append(time.perf_counter() - start)
    fastest = sorted(seconds[WARM_UP:])[: max(1, num_steps // 2)]
    rows = sum(micro.num_rows for micro in group) * run.runtime.world_size
    return rows * len(fastest) / sum(fastest)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.steps", description=__doc__)
    parser.add_argument("-c", "--config", required=True)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--out", type=Path, help="file to which the result is added")
    parser.add_argument("overrides", nargs="*")
    arguments = parser.parse_args()
    config = loader.load(arguments.config, [*arguments.overrides, "trackers=[]", "data.num_workers=0"])
    launch = detect(os.environ)
    with tempfile.TemporaryDirectory() as folder, open_runtime(launch, config.runtime.device) as runtime:
        with opened(config, Path(folder) / str(launch.rank), runtime) as run:
            found = rows_per_s(run, arguments.steps)
        if launch.rank == 0:
            text = f"{run.parallel.describe()} on {plural(launch.world_size, 'rank')}: {found:.0f} rows/s\n"
            print(text, end="", flush=True)
            if arguments.out:
                arguments.out.write_text((arguments.out.read_text() if arguments.out.exists() else "") + text)


if __name__ == "__main__":
    main()
