"""A classifier in the style of 2019: options as strings, a prefetcher on its own stream, --resume.

Written for these tests, with generated pictures instead of ImageNet. It does not import harness.
"""

import argparse
import os
import shutil

import numpy as np
import torch
import torch.backends.cudnn as cudnn
import torch.distributed as dist
import torch.nn as nn
import torch.nn.parallel
import torch.optim
import torch.utils.data
import torch.utils.data.distributed

try:
    from apex import amp, optimizers, parallel  # noqa: F401
    from apex.fp16_utils import *  # noqa: F403
    from apex.multi_tensor_apply import multi_tensor_applier
    from apex.parallel import DistributedDataParallel as DDP
except ImportError:
    raise ImportError("this example needs apex") from None

parser = argparse.ArgumentParser(description="Classifier of stripes")
parser.add_argument("--epochs", default=4, type=int)
parser.add_argument("--stop-after", default=None, type=int, help="end after this epoch, as if killed")
parser.add_argument("-b", "--batch-size", default=16, type=int, help="per process")
parser.add_argument("--lr", "--learning-rate", default=0.1, type=float)
parser.add_argument("--resume", default="", type=str)
parser.add_argument("--deterministic", action="store_true")
parser.add_argument("--local_rank", default=0, type=int)
parser.add_argument("--sync_bn", action="store_true", help="enabling apex sync BN.")
parser.add_argument("--opt-level", type=str)
parser.add_argument("--keep-batchnorm-fp32", type=str, default=None)
parser.add_argument("--loss-scale", type=str, default=None)


class Stripes(torch.utils.data.Dataset):
    """Noisy 12 x 12 pictures, striped one way or the other."""

    def __init__(self, length, offset=0):
        self.length, self.offset = length, offset

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        random = np.random.RandomState(self.offset + index)
        label = random.randint(2)
        picture = random.randint(0, 128, (12, 12, 3))
        if label:
            picture[::3] += 100
        else:
            picture[:, ::3] += 100
        return picture.astype(np.uint8), label


def fast_collate(batch):
    pictures = torch.from_numpy(np.stack([np.rollaxis(picture, 2) for picture, _ in batch]))
    return pictures, torch.tensor([label for _, label in batch], dtype=torch.int64)


class data_prefetcher:
    """Copies the next batch while the current one is used."""

    def __init__(self, loader):
        self.loader = iter(loader)
        self.stream = torch.cuda.Stream()
        self.mean = torch.tensor([0.3 * 255] * 3).cuda().view(1, 3, 1, 1)
        self.std = torch.tensor([0.2 * 255] * 3).cuda().view(1, 3, 1, 1)
        self.preload()

    def preload(self):
        try:
            self.next_input, self.next_target = next(self.loader)
        except StopIteration:
            self.next_input, self.next_target = None, None
            return
        with torch.cuda.stream(self.stream):
            self.next_input = self.next_input.cuda(non_blocking=True)
            self.next_target = self.next_target.cuda(non_blocking=True)
            self.next_input = self.next_input.float().sub_(self.mean).div_(self.std)

    def next(self):
        torch.cuda.current_stream().wait_stream(self.stream)
        input, target = self.next_input, self.next_target
        if input is not None:
            input.record_stream(torch.cuda.current_stream())
            target.record_stream(torch.cuda.current_stream())
        self.preload()
        return input, target


def build_model():
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(inplace=True),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(16, 2),
    )


def main():
    global best_prec1, args
    best_prec1 = 0
    args = parser.parse_args()
    print("opt_level = {}".format(args.opt_level))  # noqa: UP032
    print("keep_batchnorm_fp32 = {}".format(args.keep_batchnorm_fp32), type(args.keep_batchnorm_fp32))  # noqa: UP032
    print("loss_scale = {}".format(args.loss_scale), type(args.loss_scale))  # noqa: UP032

    cudnn.benchmark = True
    if args.deterministic:
        cudnn.benchmark = False
        cudnn.deterministic = True
        torch.manual_seed(args.local_rank)
        torch.set_printoptions(precision=10)

    args.distributed = False
    if "WORLD_SIZE" in os.environ:
        args.distributed = int(os.environ["WORLD_SIZE"]) > 1
    args.gpu = 0
    args.world_size = 1
    if args.distributed:
        args.gpu = args.local_rank
        torch.cuda.set_device(args.gpu)
        torch.distributed.init_process_group(backend="nccl", init_method="env://")
        args.world_size = torch.distributed.get_world_size()
    assert torch.backends.cudnn.enabled, "Amp requires cudnn backend to be enabled."
    assert multi_tensor_applier.available

    model = build_model()
    if args.sync_bn:
        print("using apex synced BN")
        model = parallel.convert_syncbn_model(model)
    model = model.cuda()

    args.lr = args.lr * float(args.batch_size * args.world_size) / 32.0
    optimizer = torch.optim.SGD(model.parameters(), args.lr, momentum=0.9, weight_decay=1e-4)
    model, optimizer = amp.initialize(
        model,
        optimizer,
        opt_level=args.opt_level,
        keep_batchnorm_fp32=args.keep_batchnorm_fp32,
        loss_scale=args.loss_scale,
    )
    if args.distributed:
        model = DDP(model, delay_allreduce=True)
    criterion = nn.CrossEntropyLoss().cuda()

    start_epoch = 0
    if args.resume:
        checkpoint = torch.load(args.resume, map_location=lambda storage, loc: storage.cuda(args.gpu))
        start_epoch = checkpoint["epoch"]
        best_prec1 = checkpoint["best_prec1"]
        model.load_state_dict(checkpoint["state_dict"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        amp.load_state_dict(checkpoint["amp"])
        print(f"=> loaded checkpoint '{args.resume}' (epoch {start_epoch})")

    train_dataset, val_dataset = Stripes(128), Stripes(48, offset=1000)
    train_sampler = val_sampler = None
    if args.distributed:
        train_sampler = torch.utils.data.distributed.DistributedSampler(train_dataset)
        val_sampler = torch.utils.data.distributed.DistributedSampler(val_dataset)
    options = {"batch_size": args.batch_size, "num_workers": 1, "pin_memory": True, "collate_fn": fast_collate}
    train_loader = torch.utils.data.DataLoader(train_dataset, sampler=train_sampler, **options)
    val_loader = torch.utils.data.DataLoader(val_dataset, sampler=val_sampler, **options)

    first = last = None
    for epoch in range(start_epoch, args.epochs):
        if args.distributed:
            train_sampler.set_epoch(epoch)
        last = train(train_loader, model, criterion, optimizer, epoch)
        first = last if first is None else first
        prec1 = validate(val_loader, model)
        if args.local_rank == 0:
            is_best = prec1 > best_prec1
            best_prec1 = max(prec1, best_prec1)
            state = {
                "epoch": epoch + 1,
                "state_dict": model.state_dict(),
                "best_prec1": best_prec1,
                "optimizer": optimizer.state_dict(),
                "amp": amp.state_dict(),
            }
            torch.save(state, "checkpoint.pth.tar")
            if is_best:
                shutil.copyfile("checkpoint.pth.tar", "model_best.pth.tar")
        if args.stop_after is not None and epoch + 1 == args.stop_after:
            break
    checksum = sum(p.double().abs().sum() for p in amp.master_params(optimizer)).item()
    line = f"rank {args.local_rank} first {first!r} last {last!r} checksum {checksum!r} prec1 {prec1!r}\n"
    os.write(1, line.encode())


def train(train_loader, model, criterion, optimizer, epoch):
    losses = []
    model.train()
    prefetcher = data_prefetcher(train_loader)
    input, target = prefetcher.next()
    while input is not None:
        adjust_learning_rate(optimizer, epoch, len(losses) + 1, len(train_loader))
        output = model(input)
        loss = criterion(output, target)
        optimizer.zero_grad()
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        losses.append(to_python_float(reduce_tensor(loss.data)))  # noqa: F405
        torch.cuda.synchronize()
        input, target = prefetcher.next()
    return sum(losses) / len(losses)


def validate(val_loader, model):
    correct = []
    model.eval()
    prefetcher = data_prefetcher(val_loader)
    input, target = prefetcher.next()
    while input is not None:
        with torch.no_grad():
            output = model(input)
        prec1 = (output.data.argmax(1) == target).float().mean() * 100
        correct.append(to_python_float(reduce_tensor(prec1)))  # noqa: F405
        input, target = prefetcher.next()
    return sum(correct) / len(correct)


def adjust_learning_rate(optimizer, epoch, step, len_epoch):
    lr = args.lr * (0.1 ** (epoch // 3))
    if epoch < 1:  # warm up
        lr = lr * float(1 + step + epoch * len_epoch) / len_epoch
    for param_group in optimizer.param_groups:
        param_group["lr"] = lr


def reduce_tensor(tensor):
    if not args.distributed:
        return tensor
    rt = tensor.clone()
    dist.all_reduce(rt, op=dist.ReduceOp.SUM)
    rt /= args.world_size
    return rt


if __name__ == "__main__":
    main()
