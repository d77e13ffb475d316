"""Audits public trainers and known bugs with ``harness verify-resume``; see docs/resume_audit.md.

    python -m benchmarks.resume_trainers --sources FOLDER [--only TEXT ...]

Clone each repository of ``TRAINERS`` into FOLDER/NAME at the commit given there, and install the packages of its row
into the environment that runs this (or put their folder on PYTHONPATH). Data are made here. The verdicts are printed
and written to benchmarks/results/resume_trainers.md; rows that are not run again keep theirs. Rows with the number of
an issue are run at an older version of the package as well.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import os
import re
import shlex
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torchvision.io import write_jpeg

from benchmarks import machine
from harness.audit.audit import AuditRequest, audit
from harness.audit.verdict import Finding

_KEPT = machine.RESULTS / "resume_trainers.json"
_TIMEOUT_S = 600.0


def images(folder: Path) -> None:
    """An image folder: six classes, 36 images to train, 6 to test."""
    generator = torch.Generator().manual_seed(0)
    for part, count in (("train", 6), ("val", 1)):
        for label in ("ant", "bee", "cat", "dog", "elk", "fox"):
            (folder / "data" / part / label).mkdir(parents=True)
            for number in range(count):
                picture = torch.randint(256, (3, 64, 64), generator=generator, dtype=torch.uint8)
                write_jpeg(picture, str(folder / "data" / part / label / f"{number}.jpg"))


def pets(folder: Path) -> None:
    """Images as in the Oxford pets: the class is in the name."""
    images(folder)
    (folder / "images").mkdir()
    for number, path in enumerate(sorted((folder / "data" / "train").rglob("*.jpg"))):
        path.rename(folder / "images" / f"{path.parent.name}_{number}.jpg")
    shutil.rmtree(folder / "data")


def characters(folder: Path) -> None:
    """The files of nanoGPT's shakespeare_char."""
    tokens = np.random.default_rng(0).integers(0, 65, 4000).astype(np.uint16)
    target = folder / "data" / "shakespeare_char"
    target.mkdir(parents=True, exist_ok=True)
    for part in ("train", "val"):
        tokens.tofile(target / f"{part}.bin")


def mnist(folder: Path) -> None:
    """MNIST's four files with 320 digits of noise, for torchvision's and Lightning's readers."""
    generator = np.random.default_rng(0)
    target = folder / "MNIST" / "raw"
    target.mkdir(parents=True)
    for part, count in (("train", 320), ("t10k", 64)):
        head = (0x0803).to_bytes(4, "big") + b"".join(size.to_bytes(4, "big") for size in (count, 28, 28))
        (target / f"{part}-images-idx3-ubyte").write_bytes(head + generator.bytes(count * 28 * 28))
        labels = generator.integers(0, 10, count, dtype=np.uint8).tobytes()
        (target / f"{part}-labels-idx1-ubyte").write_bytes(
            (0x0801).to_bytes(4, "big") + count.to_bytes(4, "big") + labels
        )


def mrpc(folder: Path) -> None:
    """A module in the place of the hub: pairs of sentences as tokens, and a metric."""
    shutil.copy(Path(__file__).with_name("resume_scripts") / "small_mrpc.py", folder)
    shutil.copy(folder / "small_mrpc.py", folder / "by_feature")


def shapes(folder: Path) -> None:
    """16 images with a box each, as YOLO reads them."""
    generator = torch.Generator().manual_seed(0)
    for kind in ("images", "labels"):
        (folder / "shapes" / kind).mkdir(parents=True)
    for number in range(16):
        picture = torch.randint(256, (3, 64, 64), generator=generator, dtype=torch.uint8)
        write_jpeg(picture, str(folder / "shapes" / "images" / f"{number}.jpg"))
        (folder / "shapes" / "labels" / f"{number}.txt").write_text(f"{number % 2} 0.5 0.5 0.4 0.4\n")
    (folder / "Arial.ttf").touch()  # or it is downloaded
    (folder / "shapes.yaml").write_text("path: shapes\ntrain: images\nval: images\nnames: {0: one, 1: two}\n")


def coco(folder: Path) -> None:
    """16 images to train and 2 to test, each with one object, as COCO has them."""
    generator = torch.Generator().manual_seed(0)
    (folder / "annotations").mkdir()
    for part, count in (("train", 16), ("val", 2)):
        (folder / f"{part}2017").mkdir()
        rows, objects = [], []
        for number in range(1, count + 1):
            name = f"{number:012}.jpg"
            picture = torch.randint(256, (3, 64, 64), generator=generator, dtype=torch.uint8)
            write_jpeg(picture, str(folder / f"{part}2017" / name))
            rows.append({"id": number, "file_name": name, "width": 64, "height": 64})
            left, size = number % 16 + 2, 40
            corners = [left, 8, left + size, 8, left + size, 8 + size, left, 8 + size]
            objects.append(
                {"id": number, "image_id": number, "category_id": 1 + number % 3, "bbox": [left, 8, size, size],
                 "area": size * size, "iscrowd": 0, "segmentation": [corners]}
            )  # fmt: skip
        categories = [{"id": number, "name": str(number)} for number in range(1, 4)]
        content = {"info": {}, "images": rows, "annotations": objects, "categories": categories}
        (folder / "annotations" / f"instances_{part}2017.json").write_text(json.dumps(content))


SEED = "import random, numpy, torch; random.seed(0); numpy.random.seed(0); torch.manual_seed(0)\n"
HUB = (
    ("by_feature/checkpointing.py", "from datasets import load_dataset", "import small_mrpc as evaluate"),
    ("by_feature/checkpointing.py", "import evaluate\n", ""),
    ("by_feature/checkpointing.py", "= get_dataloaders(accelerator, batch_size)", "= evaluate.loaders(batch_size)"),
    ("by_feature/checkpointing.py", 'AutoModelForSequenceClassification.from_pretrained("bert-base-cased", '
     "return_dict=True)", "evaluate.model()"),
)  # fmt: skip


@dataclass(frozen=True)
class Trainer:
    """``source``: FOLDER/NAME, with the repository and commit it is; ``part``: the folder in it that is copied to work
    in. ``changes``: text of files that is replaced, for data, size and device only; in place of nothing, it is put in
    front, as the seed of a script that has none."""

    name: str
    source: str
    part: str
    package: str
    command: str
    resume: str
    data: Callable[[Path], None] | None = None
    changes: tuple[tuple[str, str, str], ...] = ()


READ = """## What the code shows

Read by a person, for the trainers audited last; remedies are rows of the table, with what was changed:

- **dcgan**: right. Only the two networks are saved: optimizers, random streams and the number of epochs are not.
- **multigpu_torchrun**: right. `EPOCHS_RUN` is the index of the last epoch, which is trained again; with `epoch + 1`
  exact. The first audit blamed torch's stream, which starts from its seed as well; the longer run now tells the two
  apart.
- **torchvision, classification and segmentation**: right. The checkpoint holds an `argparse.Namespace`, and
  `torch.load(..., weights_only=True)` refuses it. No random stream is saved either.
- **DETR**: right. The same Namespace meets the default of torch 2.6 and later. The first audit took `eval/000.pth`, the
  results of an evaluation, for the newest checkpoint; files with weights now come first. With its stream
  saved, it is still not exact, and the audit is right: the checkpoint is written before the evaluation, which draws.
- **mmengine**: right. Its checkpoints hold its own `HistoryBuffer`, which the same default refuses. With the
  variable that lifts it, a resume in the middle of an epoch trains that epoch from its beginning: right, too.
  `EpochBasedTrainLoop.run_epoch` reads its loader from the first batch on.
- **YOLOv5**: right. It saves `model.half()`, and reads the rows of the first epoch again.
- **Lightning**: issue 21938 was not confirmed, 2.5.2 and 2.6.6 read the same rows.
"""


def _remedied(name: str, remedy: str, *changes: tuple[str, str, str]) -> Trainer:
    trainer = next(each for each in _AS_SHIPPED if each.name == name)
    return replace(trainer, name=f"{name}: {remedy}", changes=(*trainer.changes, *changes))


_AS_SHIPPED = [
    Trainer(
        "pytorch/examples imagenet", "examples: pytorch/examples@77f55b9", "imagenet", "torch",
        "main.py -a resnet18 --epochs 3 -b 8 -j 2 --seed 1 --no-accel data", "--resume {latest}", images,
    ),
    Trainer(
        "timm train.py", "timm: huggingface/pytorch-image-models@aa4b585", ".", "timm",
        "train.py data --model resnet18 --num-classes 6 -b 8 -vb 8 -j 2 --epochs 3 --sched cosine --img-size 64 --opt "
        "adamw --device cpu --output {out}",
        "--resume {latest}", images,
    ),
    Trainer(
        "timm train.py, EMA", "timm: huggingface/pytorch-image-models@aa4b585", ".", "timm",
        "train.py data --model resnet18 --num-classes 6 -b 8 -vb 8 -j 2 --epochs 3 --sched cosine --img-size 64 --opt "
        "adamw --model-ema --mixup 0.2 --device cpu --output {out}",
        "--resume {latest}", images,
    ),
    Trainer(
        "nanoGPT", "nanoGPT: karpathy/nanoGPT@3adf61e", ".", "torch",
        "train.py config/train_shakespeare_char.py --device=cpu --compile=False --eval_iters=2 --eval_interval=5 "
        "--block_size=32 --batch_size=4 --n_layer=2 --n_head=2 --n_embd=32 --max_iters=20 --lr_decay_iters=20 "
        "--always_save_checkpoint=True --out_dir={out}",
        "--init_from=resume", characters,
    ),
    Trainer(
        "Apex imagenet through harness.apex", "apex: NVIDIA/apex@6424da3", "examples/imagenet", "torch",
        "-m harness.apex --device cpu main_amp.py -a resnet18 --epochs 3 -b 8 -j 2 --opt-level O1 --deterministic data",
        "--resume {latest}", images,
    ),
    Trainer(
        "accelerate complete_cv_example", "accelerate: huggingface/accelerate@16cb6eb", "examples", "accelerate",
        "complete_cv_example.py --cpu --data_dir images --checkpointing_steps 3 --output_dir {out}",
        "--resume_from_checkpoint {latest}", pets,
        (("complete_cv_example.py", 'create_model("resnet50d", pretrained=True', 'create_model("resnet18"'),
         ("complete_cv_example.py", '"batch_size": 64, "image_size": 224', '"batch_size": 4, "image_size": 64')),
    ),
    Trainer(
        "ignite mnist_save_resume_engine", "ignite: pytorch/ignite@de08e79", "examples/mnist", "pytorch-ignite",
        "mnist_save_resume_engine.py --epochs 3 --batch_size 16 --val_batch_size 16 --log_interval 10 "
        "--checkpoint_every 1 --log_dir {out}",
        "--resume_from {latest}", mnist,
    ),
    Trainer(
        "accelerate by_feature/checkpointing", "accelerate: huggingface/accelerate@16cb6eb", "examples", "accelerate",
        "by_feature/checkpointing.py --cpu --checkpointing_steps 7 --output_dir {out}",
        "--resume_from_checkpoint {latest}", mrpc, HUB,
    ),
    Trainer(
        "pytorch/examples dcgan", "examples: pytorch/examples@77f55b9", "dcgan", "torch",
        "main.py --dataset fake --imageSize 64 --batchSize 16 --ngf 4 --ndf 4 --niter 3 --manualSeed 1 --workers 1 "
        "--outf {out}",
        "--netG {out}/netG_epoch_0.pth --netD {out}/netD_epoch_0.pth", None,
        (("main.py", "image_size=", "size=160, image_size="),),
    ),
    Trainer(
        "pytorch/examples multigpu_torchrun, seeded", "examples: pytorch/examples@77f55b9",
        "distributed/ddp-tutorial-series", "torch",
        "-m torch.distributed.run --standalone --nproc_per_node=2 multigpu_torchrun.py 3 1", "", None,
        (("multigpu_torchrun.py", "", SEED),
         ("multigpu_torchrun.py", 'torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))', "pass"),
         ("multigpu_torchrun.py", "nccl", "gloo"),
         ("multigpu_torchrun.py", "(self.gpu_id)", '("cpu")'),
         ("multigpu_torchrun.py", "device_ids=[self.gpu_id]", ""),
         ("multigpu_torchrun.py", 'f"cuda:{self.gpu_id}"', '"cpu"'),
         ("multigpu_torchrun.py", "2048", "640")),
    ),
    Trainer(
        "torchvision classification, seeded", "vision: pytorch/vision@5ed4962", "references/classification",
        "torchvision",
        "train.py --data-path data --model resnet18 --train-crop-size 64 --val-resize-size 64 --val-crop-size 64 "
        "-b 8 -j 2 --epochs 3 --device cpu --output-dir {out}",
        "--resume {latest}", images, (("train.py", "", SEED),),
    ),
    Trainer(
        "torchvision segmentation, seeded", "vision: pytorch/vision@5ed4962", "references/segmentation", "torchvision",
        "train.py --data-path . --dataset coco --model lraspp_mobilenet_v3_large -b 4 -j 1 --epochs 3 --device cpu "
        "--output-dir {out}",
        "--resume {latest}", coco, (("train.py", "", SEED), ("train.py", "base_size=520", "base_size=96"),
         ("train.py", "crop_size=480", "crop_size=64")),
    ),
    Trainer(
        "DETR", "detr: facebookresearch/detr@29901c5", ".", "torch",
        "main.py --coco_path . --backbone resnet18 --enc_layers 1 --dec_layers 1 --dim_feedforward 64 --hidden_dim 32 "
        "--num_queries 8 --batch_size 4 --epochs 3 --num_workers 1 --device cpu --output_dir {out}",
        "--resume {latest}", coco,
        (("models/backbone.py", "pretrained=is_main_process()", "weights=None"),
         ("datasets/coco.py", "[480, 512, 544, 576, 608, 640, 672, 704, 736, 768, 800]", "[64, 80, 96]"),
         ("datasets/coco.py", "[400, 500, 600]", "[64, 80]"), ("datasets/coco.py", "(384, 600)", "(48, 64)"),
         ("datasets/coco.py", "[800]", "[96]")),
    ),
    Trainer(
        "mmengine Runner", "scripts: benchmarks/resume_scripts", ".", "mmengine", "mmengine_fit.py {out}", "--resume",
    ),
    Trainer(
        "YOLOv5 train.py", "yolov5: ultralytics/yolov5@5081342", ".", "torch",
        "train.py --weights= --cfg models/yolov5n.yaml --data shapes.yaml --img 64 --epochs 3 --batch-size 8 "
        "--workers 1 --device cpu --noplots --noautoanchor --save-period 1 --project {out}",
        "--resume {latest}", shapes, (("models/yolov5n.yaml", "width_multiple: 0.25", "width_multiple: 0.125"),),
    ),
    Trainer(
        "HF Trainer", "scripts: benchmarks/resume_scripts", ".", "transformers",
        "hf_trainer.py --output_dir {out} --num_train_epochs 3 --save_steps 7 --per_device_train_batch_size 8 "
        "--use_cpu --report_to none --disable_tqdm True",
        "--resume_from_checkpoint {latest}",
    ),
    Trainer(
        "HF Trainer, random augmentation (#39215)", "scripts: benchmarks/resume_scripts", ".", "transformers",
        "hf_trainer.py --output_dir {out} --num_train_epochs 3 --save_steps 7 --per_device_train_batch_size 8 "
        "--use_cpu --report_to none --disable_tqdm True --augment",
        "--resume_from_checkpoint {latest}",
    ),
    Trainer(
        "accelerate, seedable sampler (#4071)", "scripts: benchmarks/resume_scripts", ".", "accelerate",
        "accelerate_loop.py --output_dir {out}", "--resume_from_checkpoint {latest}",
    ),
    Trainer(
        "accelerate, seedable sampler, dropout", "scripts: benchmarks/resume_scripts", ".", "accelerate",
        "accelerate_loop.py --dropout 0.1 --output_dir {out}", "--resume_from_checkpoint {latest}",
    ),
    Trainer(
        "Lightning, save every 7 steps", "scripts: benchmarks/resume_scripts", ".", "lightning",
        "lightning_fit.py --every 7", "--resume {latest}",
    ),
    Trainer(
        "Lightning, sampler with set_epoch, workers (#21938)", "scripts: benchmarks/resume_scripts", ".", "lightning",
        "lightning_fit.py --every 20 --workers 1", "--resume {latest}",
    ),
]  # fmt: skip
TRAINERS = [
    *_AS_SHIPPED,
    # Remedies: what a checkpoint does not hold is saved and restored.
    _remedied(
        "pytorch/examples imagenet", "torch's stream saved and restored",
        ("main.py", "'epoch': epoch + 1,", "'epoch': epoch + 1, 'stream': torch.get_rng_state(),"),
        ("main.py", "    for epoch in range(args.start_epoch",
         "    if args.resume:\n        torch.set_rng_state(torch.load(args.resume)['stream'])\n"
         "    for epoch in range(args.start_epoch"),
    ),
    _remedied(
        "nanoGPT", "stream before the evaluation and the batch at hand saved and restored",
        ("train.py", "    if iter_num % eval_interval == 0 and master_process:",
         "    stream = torch.get_rng_state()\n    if iter_num % eval_interval == 0 and master_process:"),
        ("train.py", "'config': config,", "'config': config, 'stream': stream, 'batch': (X, Y),"),
        ("train.py", "checkpoint = None # free", "saved = checkpoint if init_from == 'resume' else None #"),
        ("train.py", "t0 = time.time()\nlocal_iter_num",
         "if saved:\n    torch.set_rng_state(saved['stream'])\n    X, Y = saved['batch']\n"
         "t0 = time.time()\nlocal_iter_num"),
    ),
    _remedied(
        "pytorch/examples multigpu_torchrun, seeded", "the number of finished epochs saved",
        ("multigpu_torchrun.py", '"EPOCHS_RUN": epoch,', '"EPOCHS_RUN": epoch + 1,'),
    ),
    _remedied(
        "mmengine Runner", "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD=1",
        ("mmengine_fit.py", "import sys\n",
         "import os\nimport sys\nos.environ['TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD'] = '1'\n"),
    ),
    _remedied(
        "torchvision classification, seeded", "weights_only=False, torch's stream saved and restored",
        ("train.py", 'map_location="cpu", weights_only=True', 'map_location="cpu", weights_only=False'),
        ("train.py", '"epoch": epoch,', '"epoch": epoch, "stream": torch.get_rng_state(),'),
        ("train.py", '    print("Start training")',
         '    if args.resume:\n        torch.set_rng_state(checkpoint["stream"])\n    print("Start training")'),
    ),
    _remedied(
        "DETR", "weights_only=False, torch's stream saved and restored",
        ("main.py", "torch.load(args.resume, map_location='cpu')",
         "torch.load(args.resume, map_location='cpu', weights_only=False)"),
        ("main.py", "'epoch': epoch,\n                    'args'",
         "'epoch': epoch, 'stream': torch.get_rng_state(),\n                    'args'"),
        ("main.py", '    print("Start training")',
         '    if args.resume:\n        torch.set_rng_state(checkpoint["stream"])\n    print("Start training")'),
    ),
    _remedied(
        "DETR", "the same, and the stream left by the evaluation as it was",
        ("main.py", "torch.load(args.resume, map_location='cpu')",
         "torch.load(args.resume, map_location='cpu', weights_only=False)"),
        ("main.py", "'epoch': epoch,\n                    'args'",
         "'epoch': epoch, 'stream': torch.get_rng_state(),\n                    'args'"),
        ("main.py", '    print("Start training")',
         '    if args.resume:\n        torch.set_rng_state(checkpoint["stream"])\n    print("Start training")'),
        ("main.py", "        test_stats, coco_evaluator = evaluate(\n            model",
         "        stream = torch.get_rng_state()\n        test_stats, coco_evaluator = evaluate(\n            model"),
        ("main.py", "        log_stats =", "        torch.set_rng_state(stream)\n        log_stats ="),
    ),
]  # fmt: skip


def prepared(trainer: Trainer, sources: Path, folder: Path) -> Path:
    """Return a working folder in ``folder`` with the source and the data of a trainer."""
    source = sources / trainer.source.partition(":")[0] / trainer.part
    if trainer.source.startswith("scripts:"):
        source = Path(__file__).with_name("resume_scripts")
    if not source.is_dir():
        raise SystemExit(f"{source} is missing: clone {trainer.source} there")
    work = folder / "work"
    shutil.copytree(source, work, ignore=shutil.ignore_patterns(".git"))
    if trainer.data:
        trainer.data(work)
    for name, old, new in trainer.changes:
        text = (work / name).read_text()
        if old not in text:
            raise SystemExit(f"{trainer.name}: {name} does not contain {old!r}; the source is another version")
        (work / name).write_text(text.replace(old, new) if old else new + text)
    return work


def _say(line: str) -> None:
    print("   ", line, flush=True)


def audited(trainer: Trainer, sources: Path) -> dict[str, str]:
    """Return a row of the table."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        request = AuditRequest(
            [sys.executable, *shlex.split(trainer.command)],
            resume=trainer.resume,
            timeout_s=_TIMEOUT_S,
            source=prepared(trainer, sources, Path(folder)),
        )
        verdict = audit(request, _say)
    starts = [start.wall_s for start in verdict.starts]
    seconds = time.monotonic() - began
    for finding in verdict.findings:
        print("    ", finding.code, finding.text, *finding.evidence, sep="\n        ", flush=True)
    for note in verdict.notes:
        print("     note:", note)
    return {
        "trainer": trainer.name,
        "version": f"{trainer.package} {importlib.metadata.version(trainer.package)}, "
        f"{trainer.source.partition(': ')[2]}",
        "command": f"`python {trainer.command}`, resumed with `{trainer.resume or 'nothing'}`",
        "verdict": verdict.kind,
        "evidence": re.sub(r"/[^\s:]*/([^/\s]+/[^/\s]+)", r".../\1", "; ".join(map(_shown, verdict.findings))) or "-",
        "starts": str(len(starts)),
        "audit s": f"{seconds:.0f}",
        "one run s": f"{starts[0]:.0f}" if starts else "-",
        "date": datetime.date.today().isoformat(),
    }


def _shown(finding: Finding) -> str:
    last = finding.evidence[-1:] if finding.code == "fails" else finding.evidence[:2]
    return f"{finding.code}: {finding.text}" + "".join(f" ({line})" for line in last)


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.resume_trainers", description=__doc__)
    parser.add_argument("--sources", type=Path, required=True, help="the folder with the repositories")
    parser.add_argument(
        "--only", nargs="+", default=[""], metavar="TEXT", help="trainers with this text in their names"
    )
    arguments = parser.parse_args(words)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    chosen = [trainer for trainer in TRAINERS if any(text in trainer.name for text in arguments.only)]
    if not chosen:
        parser.error(f"no trainer has {' or '.join(arguments.only)} in its name")
    for trainer in chosen:
        print(trainer.name, flush=True)
        row = audited(trainer, arguments.sources.resolve())
        print("  ", row["verdict"], flush=True)
        kept = json.loads(_KEPT.read_text()) if _KEPT.exists() else {}
        _KEPT.write_text(json.dumps({**kept, f"{trainer.name}, {row['version']}": row}, indent=1) + "\n")
    kept = json.loads(_KEPT.read_text())
    rows = [row for trainer in TRAINERS for row in kept.values() if row["trainer"] == trainer.name]
    runs = [float(row["audit s"]) / float(row["one run s"]) for row in rows if row["starts"] != "1"]
    text = (
        "`python -m benchmarks.resume_trainers`, each row on its date. Lines in brackets draw from the stream; where "
        "they are of a library or of apex-harness, the row is older than the naming of the script's own lines. An "
        f"audit took {min(runs):.1f} to {max(runs):.1f} times as long as its first start, at the median "
        f"{statistics.median(runs):.1f}, on a busy machine.\n\n"
    )
    text += machine.table(list(rows[0]), [[cell.replace("|", "/") for cell in row.values()] for row in rows])
    machine.write("resume_trainers", "Public trainers, audited", f"{text}\n\n{READ}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
