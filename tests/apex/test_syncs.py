"""No wait of the host for the device, on a GPU of ``tests.syncs``: everything in harness.apex that promises it.

Also the fast path of torch's foreach kernels, which they leave for one kernel per tensor.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from harness.apex import amp, amp_C
from harness.apex.parallel import DistributedDataParallel, batch_norm_over_ranks
from harness.apex.parallel.LARC import LARC
from tests.apex.optimizer_cases import BFLOAT, CASES, HALF, copied, every_case, give_gradients, params_of
from tests.apex.shared import Numbers, backward
from tests.ranks import run_ranks
from tests.syncs import CUDA, counted_syncs

pytestmark = pytest.mark.host

FLOAT = torch.float32


class FastPath(TorchDispatchMode):
    """Notes foreach operations on several tensors that torch runs tensor by tensor.

    The conditions are those of torch's aten/src/ATen/native/ForeachUtils.h.
    """

    def __init__(self):
        super().__init__()
        self.left = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        lists = [arg for arg in args if isinstance(arg, list) and arg and isinstance(arg[0], torch.Tensor)]
        if name.startswith("_foreach_") and lists and len(lists[0]) > 1 and not self._is_fast(name, lists):
            self.left.append(name)
        return func(*args, **(kwargs or {}))

    def _is_fast(self, name, lists):
        copies = name == "_foreach_copy_"  # which converts
        same_dtype = copies or len({tensor.dtype for tensors in lists for tensor in tensors}) == 1
        dense = all(
            t.numel() == 1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True)) for t in lists[0]
        )
        alike = all(len({(tuple(t.shape), t.stride()) for t in row}) == 1 for row in zip(*lists, strict=True))
        return same_dtype and dense and alike


def on_gpu(tensors):
    return [tensor.detach().to(CUDA).requires_grad_(tensor.requires_grad) for tensor in tensors]


@every_case
@pytest.mark.parametrize("dtypes", [(HALF, FLOAT), (BFLOAT,)])
def test_steps_of_the_fused_optimizers(make, dtypes):
    """Without a wait, on foreach's fast path, with the CPU's values."""
    host = params_of(*dtypes)
    optimizer = make(host)
    with counted_syncs() as syncs:
        params = on_gpu(copied(host))
        on_device = make(params)
        for step in range(3):
            give_gradients(host, step)
            give_gradients(params, step)
            optimizer.step()
            syncs.clear()
            with FastPath() as path:
                on_device.step()
            assert not syncs
            assert not path.left
        for param, expected in zip(params, host, strict=True):
            torch.testing.assert_close(param.detach().cpu(), expected.detach(), rtol=1e-6, atol=1e-7)


def test_step_of_larc():
    with counted_syncs() as syncs:
        params = on_gpu(params_of(FLOAT, HALF))
        optimizer = LARC(torch.optim.SGD(params, 0.1, weight_decay=0.1, foreach=True))
        for step in range(2):
            give_gradients(params, step)
            syncs.clear()
            with FastPath() as path:
                optimizer.step()
            assert not syncs
            assert not path.left


@pytest.mark.parametrize("make", [CASES["adam, capturable"], CASES["adam, masters"], CASES["mixed lamb"]])
@pytest.mark.parametrize("found", [0.0, 1.0])
def test_grad_scaler_leaves_unscaling_and_skipping_to_capturable_optimizers(make, found):
    with counted_syncs() as syncs:
        params = on_gpu(params_of(HALF))
        optimizer = make(params)
        for step in range(2):
            give_gradients(params, step)
            optimizer.grad_scale = torch.full((), 4.0, device=CUDA)
            optimizer.found_inf = torch.full((), found, device=CUDA)
            before = [param.detach().clone() for param in params]
            syncs.clear()
            optimizer.step()
            assert not syncs
            changed = [not torch.equal(a, b) for a, b in zip(before, params, strict=True)]
            assert any(changed) == (not found)


def _flag():
    return torch.zeros(1, dtype=torch.int32, device=CUDA)


def _vector(*values):
    return torch.stack([torch.full((), value, device=CUDA) for value in values])


AMP_C = {
    "scale": lambda f, a, b, c, d: amp_C.multi_tensor_scale(0, f, [a, b], 0.5),
    "axpby": lambda f, a, b, c, d: amp_C.multi_tensor_axpby(0, f, [a, b, c], 0.5, 2.0),
    "l2norm": lambda f, a, b, c, d: amp_C.multi_tensor_l2norm(0, f, [a], True),
    "l2norm total": lambda f, a, b, c, d: amp_C.multi_tensor_l2norm(0, f, [a]),
    "l2norm_mp": lambda f, a, b, c, d: amp_C.multi_tensor_l2norm_mp(0, f, [a], True),
    "unscale_l2norm": lambda f, a, b, c, d: amp_C.multi_tensor_unscale_l2norm(0, f, [a], 0.5, True),
    "sgd": lambda f, a, b, c, d: amp_C.multi_tensor_sgd(0, f, [a, b, c], 0.1, 0.9, 0.0, 0.1, False, False, False, 0.5),
    "adam": lambda f, a, b, c, d: amp_C.multi_tensor_adam(0, f, [a, b, c, d], 0.1, 0.9, 0.99, 1e-8, 1, 1, 1, 0.1),
    "adam, capturable": lambda f, a, b, c, d: amp_C.multi_tensor_adam_capturable(
        0, f, [a, b, c, d], _vector(0.1), 0.9, 0.99, 1e-8, _flag() + 1, 1, 1, 0.1, _vector(0.5)
    ),
    "adam, masters": lambda f, a, b, c, d: amp_C.multi_tensor_adam_capturable_master(
        0, f, [a, b, c, d, [t.float() for t in b]], _vector(0.1), 0.9, 0.99, 1e-8, _flag() + 1, 1, 1, 0.1, _vector(0.5)
    ),
    "adagrad": lambda f, a, b, c, d: amp_C.multi_tensor_adagrad(0, f, [a, b, c], 0.1, 1e-8, 0, 0.1),
    "novograd": lambda f, a, b, c, d: amp_C.multi_tensor_novograd(
        0, f, [a, b, c], _vector(*[1.0] * len(a)), 0.1, 0.9, 0.99, 1e-8, 1, 1, 0.1, 1, 0, 2
    ),
    "lamb": lambda f, a, b, c, d: amp_C.multi_tensor_lamb(
        0, f, [a, b, c, d], 0.1, 0.9, 0.99, 1e-8, 1, 1, 0.1, 1, 1, _vector(2.0), 1.0
    ),
    "lamb_mp": lambda f, a, b, c, d: amp_C.multi_tensor_lamb_mp(
        *(0, f, [a, b, c, d], _vector(0.1), 0.9, 0.99, 1e-8, _flag() + 1, 1, 0.1, 1, 1, _vector(2.0), _vector(1.0)),
        *(False, _vector(0.0), _vector(0.5)),
    ),
    "lamb stage 1": lambda f, a, b, c, d: amp_C.multi_tensor_lamb_stage1_cuda(
        0, f, [a, b, c, d, [t.clone() for t in a]], _vector(*[0.1] * len(a)), 1, 0.9, 0.99, 1e-8, _vector(2.0), 1.0
    ),
    "lamb stage 2": lambda f, a, b, c, d: amp_C.multi_tensor_lamb_stage2_cuda(
        0, f, [a, b], _vector(*[1.0] * len(a)), _vector(*[2.0] * len(a)), 0.1, 0.1
    ),
    "hysteresis": lambda f, a, b, c, d: amp_C.update_scale_hysteresis(
        _vector(4.0), _flag(), _flag() + 2, _vector(1.0), 2.0, 0.5, 10, 2
    ),
}


@pytest.mark.parametrize("name", AMP_C)
def test_functions_of_amp_c(name):
    with counted_syncs() as syncs:
        lists = [[t.abs() for t in on_gpu(params_of(HALF, FLOAT, HALF))] for _ in range(4)]
        lists = [[t.detach() for t in tensors] for tensors in lists]
        flag = _flag()
        syncs.clear()
        AMP_C[name](flag, *lists)
        assert not syncs


def test_norms_keep_their_order_over_several_kinds():
    xs = params_of(FLOAT, HALF, FLOAT, torch.float64)
    mixed = [xs[i] for i in (0, 5, 13, 1, 4, 12, 9, 2)]
    total, each = amp_C.multi_tensor_l2norm(0, torch.zeros(1, dtype=torch.int32), [mixed], True)
    assert each.dtype is torch.float64
    expected = torch.stack([x.detach().double().norm() for x in mixed])
    torch.testing.assert_close(each, expected, rtol=1e-3, atol=1e-5)
    torch.testing.assert_close(total, expected.norm().reshape(1), rtol=1e-3, atol=1e-5)


def _accumulated() -> None:
    """O1 with gradients that were accumulated without reduction: amp has set them aside, and they are reduced."""
    rank = dist.get_rank()
    expected = None
    for device in ("cpu", CUDA):
        with counted_syncs() as syncs:
            amp.reset()
            model = Numbers().to(device)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
            amp.initialize(model, optimizer, opt_level="O0", loss_scale=8.0, verbosity=0)
            net = DistributedDataParallel(model, delay_allreduce=True)
            for first in (True, False, True, False):
                syncs.clear()
                if first:
                    with net.no_sync():
                        backward(net([1.0 + rank] * 3), optimizer)
                else:
                    backward(net([1.0 + rank] * 3), optimizer)
                assert not [sync for sync in syncs if "apex/parallel/" in sync.line], syncs
            found = [p.grad.cpu() for p in model.parameters()]
            net = DistributedDataParallel(
                Numbers().to(device), delay_allreduce=True
            )  # without amp, nothing is set aside
            with net.no_sync():
                net([1.0] * 3).backward()
            syncs.clear()
            net([1.0] * 3).backward()
            assert not [sync for sync in syncs if "apex/parallel/" in sync.line], syncs
        expected = expected or found
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
        assert all((a == 6.0).all() for a in found), "twice the average of 1 and 2, accumulated twice"
    amp.reset()


def test_reducing_what_amp_has_set_aside():
    run_ranks(2, _accumulated, timeout_s=60)


def _batch_norm_over_ranks() -> None:
    rank, group = dist.get_rank(), dist.group.WORLD

    def passed(device: str) -> list[torch.Tensor]:
        x = (torch.arange(24.0).view(4, 3, 2) * (rank + 1)).to(device).requires_grad_()
        weight, bias = (torch.full((3,), value, device=device, requires_grad=True) for value in (2.0, 1.0))
        result = batch_norm_over_ranks.normalize(
            x, weight, bias, *batch_norm_over_ranks.global_statistics(x, group), 1e-5, group
        )
        (result * torch.full_like(result, rank + 1.0)).cos().sum().backward()
        return [result.detach(), x.grad, weight.grad, bias.grad]

    expected = passed("cpu")
    with counted_syncs() as syncs:
        found = passed("cuda:0")
        waits = [sync for sync in syncs if "batch_norm" in sync.line]
        assert not waits, waits
        assert all(torch.equal(a.cpu(), b) for a, b in zip(found, expected, strict=True))


def test_batch_norm_over_ranks():
    run_ranks(2, _batch_norm_over_ranks, timeout_s=60)
