"""Code that a patch adds to a script, where torch has no counterpart of a part of Apex."""

from __future__ import annotations

LARC = '''
class LARC:
    """``optimizer`` with layer-wise adaptive rates, like apex.parallel.LARC (You, Gitman and Ginsburg 2017)."""

    def __init__(self, optimizer, trust_coefficient=0.02, clip=True, eps=1e-8):
        self.optim, self.trust_coefficient, self.clip, self.eps = optimizer, trust_coefficient, clip, eps

    def __getattr__(self, name):  # param_groups, state_dict, zero_grad and so on
        if name == "optim":  # not there yet, while a copy is made
            raise AttributeError(name)
        return getattr(self.optim, name)

    @torch.no_grad()
    def step(self):
        decays = [group.get("weight_decay", 0.0) for group in self.optim.param_groups]
        for group, decay in zip(self.optim.param_groups, decays):
            group["weight_decay"] = 0.0
            for p in (p for p in group["params"] if p.grad is not None):
                weight, gradient = p.norm(), p.grad.norm()
                rate = self.trust_coefficient * weight / (gradient + decay * weight + self.eps)
                if self.clip:
                    rate = (rate / group["lr"]).clamp(max=1.0)
                scaled = (p.grad + decay * p) * rate
                p.grad.copy_(torch.where((weight == 0) | (gradient == 0), p.grad, scaled))
        self.optim.step()
        for group, decay in zip(self.optim.param_groups, decays):
            group["weight_decay"] = decay
'''

CAST_INPUTS = '''
def cast_inputs(dtype):
    """A decorator: while autocast is on, cast floating-point arguments to ``dtype`` and turn autocast off inside."""

    def decorate(function):
        @functools.wraps(function)
        def casting(*args, **kwargs):
            if not torch.is_autocast_enabled("cuda"):
                return function(*args, **kwargs)

            def cast(value):
                return value.to(dtype) if torch.is_tensor(value) and value.is_floating_point() else value

            with torch.amp.autocast("cuda", enabled=False):
                return function(*map(cast, args), **{key: cast(value) for key, value in kwargs.items()})

        return casting

    return decorate
'''


def lines(names: set[str], scaler: str, unit: str) -> list[str]:
    """The lines to insert after the imports of a script."""
    found = []
    if "scaler" in names:
        found += ["", f'{scaler} = torch.amp.GradScaler("cuda", enabled=False)  # replaced where amp was initialized']
    for name, code in (("LARC", LARC), ("cast_inputs", CAST_INPUTS)):
        if name in names:
            found += ["", *(line.replace("    ", unit) for line in code.rstrip().split("\n")), ""]
    return found
