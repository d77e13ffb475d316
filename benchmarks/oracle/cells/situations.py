"""What scripts do around the training step: several losses, clipping, schedules, new groups, resuming."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from benchmarks.oracle.cells.kit import (
    LEVELS,
    Result,
    adam,
    cells,
    convnet,
    cross_entropy,
    fit,
    images,
    mlp,
    outcome,
    sgd,
    vectors,
)


def _start(level: str, net: nn.Module | None = None, make: Any = sgd, **options: Any) -> tuple[nn.Module, Any]:
    from apex import amp

    net = net or convnet()
    return amp.initialize(net, make(net.parameters()), opt_level=level, verbosity=0, **options)


@cells("two losses", level=LEVELS, scalers=(1, 2), overflow=(None, 0, 1))
def two_losses(level: str, scalers: int, overflow: int | None) -> Result:
    """Of one model with one optimizer; ``overflow`` is the loss that overflows once."""
    from apex import amp

    net, optimizer = _start(level, mlp(), num_losses=scalers, loss_scale="dynamic")
    losses = []
    for step, (x, y) in enumerate(vectors(6)):
        output = net(x)
        both = [cross_entropy(output, y), output.float().pow(2).mean()]
        for i, loss in enumerate(both):
            loss = loss * 1e38 if (step, i) == (2, overflow) else loss
            with amp.scale_loss(loss, optimizer, loss_id=i % scalers) as scaled:
                scaled.backward(retain_graph=i == 0)
            losses.append(loss.detach())
        optimizer.step()
        if step < 5:
            optimizer.zero_grad()
    return {"losses": losses, **outcome(net, optimizer)}


@cells("two models, two optimizers", level=LEVELS, overflow=(False, True))
def two_models(level: str, overflow: bool) -> Result:
    """Each with a loss of its own, and a third loss that reaches both."""
    from apex import amp

    nets = [mlp(), mlp()]
    pair = [sgd(nets[0].parameters()), adam(nets[1].parameters())]
    nets, pair = amp.initialize(nets, pair, opt_level=level, num_losses=3, loss_scale="dynamic", verbosity=0)
    losses = []
    for step, (x, y) in enumerate(vectors(6)):
        for optimizer in pair:
            optimizer.zero_grad()
        outputs = [net(x) for net in nets]
        each = [cross_entropy(output, y) for output in outputs]
        each.append((outputs[0] * outputs[1]).float().mean())
        each[1] = each[1] * 1e38 if overflow and step == 3 else each[1]
        for i, (loss, owners) in enumerate(zip(each, ([pair[0]], [pair[1]], pair), strict=True)):
            with amp.scale_loss(loss, owners, loss_id=i) as scaled:
                scaled.backward(retain_graph=i < 2)
            losses.append(loss.detach())
        for optimizer in pair:
            optimizer.step()
    return {"losses": losses, **outcome(nets, pair)}


@cells("generator and discriminator", level=LEVELS)
def gan(level: str) -> Result:
    """In the manner of the dcgan example: gradients of two contexts add up, module.zero_grad() clears them."""
    from apex import amp

    maker, judge = (
        nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 8)),
        nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1)),
    )
    pair = [adam(judge.parameters()), adam(maker.parameters())]
    [judge, maker], pair = amp.initialize([judge, maker], pair, opt_level=level, num_losses=3, verbosity=0)
    criterion, losses = nn.BCEWithLogitsLoss(), []
    for real, _ in vectors(6, width=8):
        fake = maker(real[:, :4])
        judge.zero_grad()
        for i, (batch, label) in enumerate(((real, 1.0), (fake.detach(), 0.0))):
            loss = criterion(judge(batch), torch.full((8, 1), label))
            with amp.scale_loss(loss, pair[0], loss_id=i) as scaled:
                scaled.backward()
            losses.append(loss.detach())
        pair[0].step()
        maker.zero_grad()
        loss = criterion(judge(fake), torch.ones(8, 1))
        with amp.scale_loss(loss, pair[1], loss_id=2) as scaled:
            scaled.backward()
        losses.append(loss.detach())
        pair[1].step()
    return {"losses": losses, **outcome([judge, maker], pair)}


@cells("several backward passes in a context", level=LEVELS)
def several_backwards(level: str) -> Result:
    from apex import amp

    net, optimizer = _start(level, mlp(), loss_scale="dynamic")
    for x, y in vectors(5):
        optimizer.zero_grad()
        output = net(x)
        with amp.scale_loss(cross_entropy(output, y), optimizer) as scaled:
            scaled.backward(retain_graph=True)
            (scaled * 0.5).backward()
        optimizer.step()
    return outcome(net, optimizer)


@cells("clip master_params", level=LEVELS, by=("norm", "value"))
def clipping(level: str, by: str) -> Result:
    from apex import amp

    net, optimizer = _start(level, loss_scale="dynamic")
    norms: list[Any] = []

    def clip(step: int) -> None:
        if by == "norm":
            norms.append(nn.utils.clip_grad_norm_(list(amp.master_params(optimizer)), 0.5).detach())
        else:
            nn.utils.clip_grad_value_(list(amp.master_params(optimizer)), 0.01)

    return {**fit(net, optimizer, images(8), before_step=clip, overflow=(3,)), "norms": norms}


@cells("LARC", level=LEVELS, clip=(True, False), decay=(0.0, 1e-2))
def larc(level: str, clip: bool, decay: float) -> Result:
    from apex import amp
    from apex.parallel.LARC import LARC

    net = convnet()
    inner = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=decay)
    optimizer = LARC(inner, trust_coefficient=0.1, clip=clip)
    net, optimizer = amp.initialize(net, optimizer, opt_level=level, verbosity=0, loss_scale="dynamic")
    return fit(net, optimizer, images(8), overflow=(4,))


@cells("LARC around an initialized optimizer", level=LEVELS)
def larc_outside(level: str) -> Result:
    from apex.parallel.LARC import LARC

    net, inner = _start(level, loss_scale="dynamic")
    return fit(net, inner, images(6), steps=LARC(inner, trust_coefficient=0.02))


SCHEDULES = {
    "step": lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5),
    "cosine": lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 8),
    "one cycle": lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=12),
}


@cells("schedule", level=LEVELS, schedule=SCHEDULES)
def schedule(level: str, schedule: str) -> Result:
    net, optimizer = _start(level, loss_scale="dynamic")
    scheduler = SCHEDULES[schedule](optimizer)
    result = fit(net, optimizer, images(8), overflow=(2,), after_step=lambda step: scheduler.step())
    return {**result, "lr": scheduler.get_last_lr()}


@cells("group added later", level=LEVELS, overflow=(False, True))
def added_group(level: str, overflow: bool) -> Result:
    """The head is trained from the start, the body from the fourth step on, as when a backbone is unfrozen."""
    from apex import amp

    net = convnet()
    optimizer = torch.optim.SGD(net[6:].parameters(), lr=0.05, momentum=0.9)
    net, optimizer = amp.initialize(net, optimizer, opt_level=level, verbosity=0, loss_scale="dynamic")

    def add(step: int) -> None:
        if step == 3:
            optimizer.zero_grad()
            optimizer.add_param_group({"params": list(net[:6].parameters()), "lr": 0.01})

    return fit(net, optimizer, images(9), after_step=add, overflow=(1, 6) if overflow else ())


@cells("groups with other rates", level=LEVELS)
def groups(level: str) -> Result:
    def make(_: Any) -> torch.optim.Optimizer:
        decayed = [parameter for parameter in net.parameters() if parameter.dim() > 1]
        plain = [parameter for parameter in net.parameters() if parameter.dim() <= 1]
        groups = [{"params": decayed, "weight_decay": 1e-2}, {"params": plain, "weight_decay": 0.0, "lr": 0.02}]
        return torch.optim.AdamW(groups, lr=1e-3, eps=1e-4)

    net = convnet()
    return fit(*_start(level, net, make), images(6))


@cells("frozen parameters", level=LEVELS)
def frozen(level: str) -> Result:
    net = convnet()
    net[0].requires_grad_(False)
    return fit(*_start(level, net), images(6))


@cells("parameters without gradient", level=LEVELS)
def unused(level: str) -> Result:
    return fit(*_start(level, _Skips(mlp()), loss_scale="dynamic"), vectors(6))


class _Skips(nn.Module):
    """Uses its second layer only for every other batch."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body, self.extra, self.calls = body, nn.Linear(10, 10), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.extra(self.body(x)) if self.calls % 2 else self.body(x)


@cells("resume", level=LEVELS, make=("sgd", "adam"), masters=(False, True))
def resume(level: str, make: str, masters: bool) -> Result:
    """Save after five steps and go on in new objects, in the recipe of Apex's documentation.

    ``masters``: also save and restore ``master_params``, once they exist, as scripts did against O2's loss of them.
    """
    from apex import amp

    make_optimizer = {"sgd": sgd, "adam": adam}[make]
    net, optimizer = _start(level, mlp(), make_optimizer, loss_scale="dynamic")
    fit(net, optimizer, vectors(5), overflow=(1,))
    saved = {"model": net.state_dict(), "amp": amp.state_dict(), "optimizer": optimizer.state_dict()}
    saved = {name: _clone(value) for name, value in saved.items()}
    values = [parameter.detach().clone() for parameter in amp.master_params(optimizer)]
    net, optimizer = _start(level, mlp(), make_optimizer, loss_scale="dynamic")
    net.load_state_dict(saved["model"])
    if masters:
        optimizer._amp_lazy_init()
    optimizer.load_state_dict(saved["optimizer"])
    amp.load_state_dict(saved["amp"])
    if masters:
        for parameter, value in zip(amp.master_params(optimizer), values, strict=True):
            parameter.data.copy_(value)
    return fit(net, optimizer, vectors(5, seed=2))


def _clone(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _clone(each) for key, each in value.items()}
    return [_clone(each) for each in value] if isinstance(value, list) else _cloned(value)


def _cloned(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


class _Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.first, self.second, self.reentrant = mlp(16, 32), mlp(32, 10), reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.requires_grad_() if x.is_leaf else x
        return self.second(checkpoint(self.first, x, use_reentrant=self.reentrant))


@cells("gradient checkpointing", level=LEVELS, reentrant=(True, False))
def checkpointing(level: str, reentrant: bool) -> Result:
    return fit(*_start(level, _Checkpointed(reentrant), loss_scale="dynamic"), vectors(6))


@cells("evaluate between steps", level=LEVELS)
def evaluation(level: str) -> Result:
    net, optimizer = _start(level)
    outputs = []

    def evaluate(step: int) -> None:
        net.eval()
        with torch.no_grad():
            outputs.append(net(next(images(1, seed=9))[0]))
        net.train()

    return {**fit(net, optimizer, images(6), after_step=evaluate), "outputs": outputs}


@cells("penalty on weights in the loss", level=LEVELS)
def penalty(level: str) -> Result:
    net, optimizer = _start(level, mlp())

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return cross_entropy(output, target) + 1e-3 * sum(p.float().norm() for p in net.parameters())

    return fit(net, optimizer, vectors(6), loss=loss)


@cells("optimizer", level=LEVELS, name=("RMSprop", "Adagrad", "AdamW", "Adadelta", "NAdam", "Rprop"))
def torch_optimizers(level: str, name: str) -> Result:
    options = {} if name == "Rprop" else {"eps": 1e-3}  # torch's own are 0 in float16

    def make(parameters: Any) -> torch.optim.Optimizer:
        return getattr(torch.optim, name)(parameters, lr=1e-3, **options)

    return fit(*_start(level, mlp(), make), vectors(6))
