"""``--device cpu`` within this process: CUDA calls run on the CPU. With launchers, see test_runner."""

from __future__ import annotations

import copy
import io
import os
import threading

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import harness.apex
from harness.apex import amp, call_counter
from harness.apex.on_cpu import (
    device_arguments,
    distributed,
    generators,
    placement,
    redirect_cuda,
    torch_cuda,
)
from tests.ranks import run_ranks

pytestmark = [pytest.mark.host, pytest.mark.contract("9"), pytest.mark.filterwarnings("ignore::FutureWarning")]

CUDA = ["cuda", "cuda:1", torch.device("cuda"), torch.device("cuda", 1), 0]


@pytest.fixture(autouse=True)
def redirected(_fresh_amp):
    harness.apex.install()
    redirect_cuda()
    yield
    harness.apex.uninstall()
    call_counter.reset()


def really(tensor):
    """The device on which torch keeps ``tensor``, whatever scripts are told."""
    return torch._C.TensorBase.device.__get__(tensor)


def attributes():
    """{(owner, name): value} of every attribute of the modules and classes that are redirected."""
    modules = (placement, device_arguments, torch_cuda, distributed)
    owners = {owner for module in modules for owner, _, _ in module.replacements()}
    return {(owner, name): value for owner in owners for name, value in vars(owner).items() if name != "__doc__"}


def test_uninstall_restores_every_attribute():
    during = attributes()
    harness.apex.uninstall()
    before = attributes()
    redirect_cuda()
    harness.apex.uninstall()
    after = attributes()
    assert after.keys() == before.keys()
    assert not [key for key in before if after[key] is not before[key]]
    changed = {name for (owner, name), value in during.items() if before.get((owner, name)) is not value}
    assert {"cuda", "to", "zeros", "is_available", "load", "FloatTensor", "init_process_group"} <= changed


# Tensors and modules


@pytest.mark.parametrize("device", CUDA, ids=str)
def test_every_form_of_a_device_is_redirected(device):
    x = torch.ones(2)
    made = [x.cuda(device), x.to(device, torch.half, non_blocking=True), x.to(device=device, dtype=torch.double)]
    for tensor in [*made, torch.ones_like(x, device=device), torch.normal(1.0, 0.0, (2,), device=device)]:
        assert really(tensor).type == "cpu"
        assert tensor.get_device() == (1 if "1" in str(device) else 0)
        torch.testing.assert_close(tensor.float(), x)
    with pytest.raises(RuntimeError):
        x.to("nonsense")


def test_every_factory_function_is_redirected():
    sample = {"arange": (3,), "zeros": (3,), "randn": (3,), "linspace": (0, 1, 3), "eye": (2,), "full": ((2,), 1.0)}
    sample |= {"randint": (5, (2,)), "randperm": (4,), "hann_window": (4,), "tril_indices": (2, 2), "empty": (2,)}
    for name, args in sample.items():
        assert getattr(torch, name)(*args, device="cuda").is_cuda
    harness.apex.uninstall()
    known = torch.utils._device._device_constructors.__wrapped__()  # torch's own list
    owners = (torch, torch.fft, torch.nested)
    before = {(owner, name): f for owner in owners for name, f in vars(owner).items() if any(f is one for one in known)}
    assert {id(f) for f in before.values()} == {id(f) for f in known}
    redirect_cuda()
    assert not [name for (owner, name), f in before.items() if getattr(owner, name) is f]


def test_a_factory_that_was_replaced_while_torch_made_its_list(monkeypatch):
    """As transformers replaces linspace while it loads a model."""
    harness.apex.uninstall()
    constructors = torch.utils._device._device_constructors
    constructors.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(torch, "linspace", lambda *args, **options: None)
        constructors()
    redirect_cuda()
    try:
        assert torch.linspace(0, 1, 3, device="cuda").is_cuda
    finally:
        harness.apex.uninstall()
        constructors.cache_clear()
        constructors()  # the originals again


def test_default_device():
    torch.set_default_device("cuda")
    try:
        assert really(nn.Linear(2, 2).weight).type == "cpu"
    finally:
        torch.set_default_device(None)
    with torch.device("cuda"):
        assert really(torch.zeros(1)).type == "cpu"
    assert torch.device("cuda", 1).type == "cuda", "a device is only a name; it is redirected where it is used"


def test_modules_are_on_the_cpu():
    model = nn.Sequential(nn.Linear(2, 2, device="cuda"), nn.LSTM(2, 3)).cuda().to("cuda:0").cuda(0).half().float()
    assert {really(p).type for p in model.parameters()} == {"cpu"}
    assert {p.device for p in model.parameters()} == {torch.device("cuda", 0)}
    assert all(p.is_leaf for p in model.parameters())
    counts = call_counter.counts()
    assert (counts["Module.cuda"], counts["Module.to(cuda)"]) == (2, 1)
    assert "Tensor.to(cuda)" not in counts, "calls that torch makes itself are not counted"
    assert model.to(memory_format=torch.preserve_format)[0].weight.dtype is torch.float32
    assert (
        torch.zeros(1, 2, 3, 3).cuda(memory_format=torch.channels_last).is_contiguous(memory_format=torch.channels_last)
    )


@pytest.mark.filterwarnings("ignore:torch.set_default_tensor_type")
def test_tensor_types():
    x = torch.cuda.FloatTensor([1, 2])
    assert x.type() == "torch.cuda.FloatTensor"
    assert isinstance(x, torch.cuda.FloatTensor)
    assert not isinstance(x, torch.cuda.HalfTensor)
    assert not isinstance(x.tolist(), torch.cuda.FloatTensor)
    assert x.type(torch.cuda.HalfTensor).dtype is torch.half
    assert x.type("torch.cuda.LongTensor").dtype is torch.long
    assert x.type(torch.double).dtype is torch.double
    assert nn.Linear(2, 2).type(torch.cuda.HalfTensor).weight.dtype is torch.half
    try:
        torch.set_default_tensor_type("torch.cuda.DoubleTensor")
        assert torch.zeros(1).dtype is torch.double
    finally:
        torch.set_default_tensor_type(torch.cuda.FloatTensor)
    assert torch.zeros(1).dtype is torch.float32


def test_generators_and_random_states():
    generator = torch.Generator(device="cuda")
    assert isinstance(generator, torch.Generator)
    assert isinstance(torch.default_generator, torch.Generator)
    generator.manual_seed(3)
    one = torch.randn(2, generator=generator, device="cuda")
    assert torch.equal(one, torch.randn(2, generator=torch.Generator().manual_seed(3)))

    torch.cuda.manual_seed(5)
    one = torch.rand(1, device="cuda")
    torch.cuda.manual_seed_all(5)
    assert torch.equal(torch.rand(1, device="cuda"), one)
    assert torch.cuda.initial_seed() == 5
    state, states = torch.cuda.get_rng_state(), torch.cuda.get_rng_state_all()
    one = torch.rand(1, device="cuda")
    torch.cuda.set_rng_state(state)
    assert torch.equal(torch.rand(1, device="cuda"), one)
    torch.cuda.set_rng_state_all(states)
    torch.cuda.set_rng_state(torch.zeros(16, dtype=torch.uint8))  # saved on a real GPU
    assert torch.equal(torch.rand(1, device="cuda"), one)
    with torch.random.fork_rng():
        torch.rand(3)
    torch.manual_seed(1)
    after = torch.rand(1)
    assert torch.equal(torch.rand(1, generator=torch.Generator().manual_seed(1)), after)


def test_seeding_cuda_does_not_change_the_order_of_the_data(monkeypatch):
    """Ranks often seed CUDA differently and the CPU alike, to shuffle alike."""
    torch.manual_seed(0)
    order = torch.randperm(100)
    torch.manual_seed(0)
    torch.cuda.manual_seed(1)
    torch.rand(3, device="cuda")
    torch.cuda.set_rng_state(torch.cuda.get_rng_state())
    assert torch.equal(torch.randperm(100), order)
    torch.manual_seed(7)
    one = torch.rand(2, device="cuda")
    torch.manual_seed(7)
    assert torch.equal(torch.rand(2, device="cuda"), one), "torch.manual_seed seeds CUDA, too"

    monkeypatch.setattr(generators, "_cpu_is_seeded", False)  # a script that seeds nothing but CUDA is reproducible
    torch.cuda.manual_seed(3)
    one = F.dropout(torch.ones(64))
    torch.cuda.manual_seed(3)
    assert torch.equal(F.dropout(torch.ones(64)), one)


def test_current_device_and_stream_are_per_thread():
    found = []

    def run():
        torch.cuda.set_device(2)
        with torch.cuda.stream(torch.cuda.Stream()) as stream:
            found.append((torch.ones(1, device="cuda").get_device(), torch.cuda.current_device()))
            assert torch.cuda.current_stream() is stream

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert found == [(2, 2)]
    assert torch.cuda.current_device() == 0


# Where scripts find their tensors. Each table is what the same lines do under CUDA.

HOST_TYPE, CUDA_TYPE = "torch.FloatTensor", "torch.cuda.FloatTensor"
SOURCES = {
    "host": lambda: torch.zeros(4, 4),
    "numpy": lambda: torch.from_numpy(np.zeros((4, 4), dtype=np.float32)),
    "computed on the host": lambda: torch.zeros(4, 4) / 255 + 0,
    "view of the host": lambda: torch.zeros(8, 4)[2:6],
    "transposed": lambda: torch.zeros(4, 4).t(),
    "with gaps": lambda: torch.zeros(4, 8)[:, ::2],
    "pinned": lambda: torch.zeros(4, 4).pin_memory(),
    "cuda": lambda: torch.zeros(4, 4).cuda(),
    "created on cuda": lambda: torch.zeros(4, 4, device="cuda"),
    "like one on cuda": lambda: torch.zeros_like(torch.zeros(4, 4, device="cuda")),
    "new from one on cuda": lambda: torch.zeros(1, device="cuda").new_zeros(4, 4),
    "view of cuda": lambda: torch.zeros(8, 4, device="cuda")[2:6],
    "detached from cuda": lambda: torch.zeros(4, 4, device="cuda", requires_grad=True).detach(),
    "parameter of a module": lambda: nn.Linear(4, 4).cuda().weight.data,
}
ON_CUDA = [name for name in SOURCES if "cuda" in name or "parameter" in name]
TO_CUDA = {
    "cuda()": lambda x: x.cuda(),
    "cuda(0)": lambda x: x.cuda(0, non_blocking=True),
    "to('cuda')": lambda x: x.to("cuda"),
    "to(device=)": lambda x: x.to(device=torch.device("cuda", 0), non_blocking=True),
    "to(0, dtype)": lambda x: x.to(0, torch.float32),
    "to(other)": lambda x: x.to(torch.zeros(1, device="cuda")),
    "type(class)": lambda x: x.type(torch.cuda.FloatTensor),
    "type(name)": lambda x: x.type("torch.cuda.FloatTensor"),
    "type_as": lambda x: x.type_as(torch.zeros(1, device="cuda")),
    "as_tensor": lambda x: torch.as_tensor(x, device="cuda"),
}
TO_HOST = {
    "cpu()": lambda x: x.cpu(),
    "to('cpu')": lambda x: x.to("cpu"),
    "to(other)": lambda x: x.to(torch.zeros(1)),
    "type(name)": lambda x: x.type("torch.FloatTensor"),
    "type_as": lambda x: x.type_as(torch.zeros(1)),
}


def is_copy(move, x) -> bool:
    """Whether ``move(x)`` has memory of its own."""
    moved = move(x)
    assert torch.equal(moved, x)
    moved.add_(1)
    if torch.equal(moved, x):
        return False
    assert moved.stride() == torch.empty_like(x).stride(), "strides are those of a copy to another device"
    return True


@pytest.mark.parametrize("source", SOURCES)
def test_only_the_first_move_to_cuda_copies(source):
    torch.zeros(1).cuda()
    for name, move in TO_CUDA.items():
        x = SOURCES[source]()
        assert is_copy(move, x) == (source not in ON_CUDA), name
        moved = move(x)
        assert move(moved) is moved or not is_copy(move, moved), name
        assert (moved.is_cuda, moved.is_cpu, moved.get_device(), moved.type()) == (True, False, 0, CUDA_TYPE), name
        assert moved.device == torch.device("cuda", 0), name
        assert isinstance(moved, torch.cuda.FloatTensor), name
    assert all(again(moved) is moved or not is_copy(again, moved) for again in TO_CUDA.values())


@pytest.mark.parametrize("source", SOURCES)
def test_moving_to_the_host_is_a_snapshot(source):
    torch.zeros(1).cuda()
    for name, move in TO_HOST.items():
        x = SOURCES[source]()
        if source != "computed on the host":  # it may as well have been computed on CUDA, so it is copied
            assert is_copy(move, x) == (source in ON_CUDA), name
        moved = move(x)
        assert not is_copy(lambda y: y.cpu(), moved), name
        assert (moved.is_cuda, moved.is_cpu, moved.get_device(), moved.type()) == (False, True, -1, HOST_TYPE), name
        assert moved.device == torch.device("cpu"), name
        assert not isinstance(moved, torch.cuda.FloatTensor), name


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
def test_moving_to_the_host_under_o1_gives_float32_there():
    model = amp.initialize(nn.Linear(2, 2).cuda(), opt_level="O1", verbosity=0)
    x = model(torch.ones(2, device="cuda"))
    assert (x.type(), x.cpu().type()) == ("torch.cuda.HalfTensor", "torch.FloatTensor")
    amp.reset()
    assert x.cpu().type() == "torch.HalfTensor"


def test_computed_tensors_are_on_cuda_once_the_script_uses_it(monkeypatch):
    monkeypatch.setattr(placement.cuda_use, "has_begun", False)
    assert (torch.zeros(1) + 1).type() == HOST_TYPE
    model = nn.Linear(2, 2).cuda().half()
    model(torch.ones(1, 2).cuda().half()).sum().backward()
    assert {p.type() for p in model.parameters()} == {p.grad.type() for p in model.parameters()}
    assert model.weight.grad.type() == "torch.cuda.HalfTensor"
    assert model.weight.storage().is_cuda
    assert model.weight.grad.untyped_storage().device.type == "cuda"
    assert torch.zeros(1).type() == HOST_TYPE


def test_moving_between_devices_copies():
    x = torch.zeros(2, device="cuda:0")
    y = x.cuda(1)
    y.add_(1)
    assert (x.sum(), x.get_device(), y.get_device(), y[0].device.index) == (0, 0, 1, 1)
    assert x.to(y).get_device() == 1


def test_data_in_memory_survives_a_prefetcher():
    """The idiom of the time: move a slice of the data, and normalize it there in place."""
    images = torch.arange(8.0)
    for _ in range(3):
        batch = images[:4].cuda(non_blocking=True)
        batch.sub_(batch.mean()).div_(2)
    pinned = images.pin_memory()
    pinned.zero_()
    assert images.tolist() == list(range(8))
    assert pinned.is_pinned()
    assert pinned.pin_memory() is pinned
    assert not images.is_pinned()


def test_snapshot_of_the_best_weights_does_not_follow_training():
    model = nn.Linear(2, 2).cuda()
    best = {name: value.cpu() for name, value in model.state_dict().items()}
    kept = model.cpu().state_dict()
    before = best["weight"].clone()
    parameter = model.weight
    model.cuda()
    with torch.no_grad():
        model.weight.add_(1)
    assert model.weight is parameter
    assert torch.equal(best["weight"], before)
    assert torch.equal(kept["weight"], before)
    assert torch.equal(model.weight.cpu(), before + 1)


def test_moved_modules_stay_themselves():
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    model[0].bias = model[1].bias  # tied
    parameters = list(model.parameters())
    moved = model.cuda()
    assert moved is model
    assert [a is b for a, b in zip(model.parameters(), parameters, strict=True)] == [True] * 3
    storages = [p.data_ptr() for p in model.parameters()]
    model.to("cuda").cuda().to(torch.zeros(1, device="cuda"))
    assert [p.data_ptr() for p in model.parameters()] == storages
    assert {b.is_cuda for b in model.buffers()} == {True}
    model.to(torch.zeros(1))
    assert {p.is_cuda for p in model.parameters()} == {False}
    assert nn.LazyLinear(2).cuda()(torch.ones(1, 3)).shape == (1, 2)


def test_moves_keep_the_gradient():
    x = torch.ones(2, requires_grad=True)
    (x.cuda() * 3).cpu().sum().backward()
    assert x.grad.tolist() == [3, 3]
    assert torch.ones(2, device="cuda", requires_grad=True).cuda().is_leaf


def test_optimizer_state_is_where_the_parameters_are():
    model = nn.Linear(2, 2).cuda()
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 2).cuda()).sum().backward()
    optimizer.step()
    state = optimizer.state_dict()
    optimizer.load_state_dict(state)
    assert {v.device.type for v in optimizer.state[model.weight].values() if v.dim()} == {"cuda"}


@pytest.mark.parametrize(
    "wrap",
    [
        lambda m: nn.DataParallel(m, [0, 1], output_device=0),
        lambda m: lambda x: nn.parallel.data_parallel(m, x, [0, 1]),
    ],
)
def test_parallel_wrappers_move_their_inputs(wrap):
    class Centered(nn.Module):
        def forward(self, x):
            return x.sub_(x.mean())

    images = torch.arange(4.0)
    assert wrap(Centered())(images[:2]).tolist() == [-0.5, 0.5]
    assert images.tolist() == [0, 1, 2, 3]
    assert list(nn.DataParallel(nn.Linear(2, 2), [0, 1]).cuda().state_dict()) == ["module.weight", "module.bias"]


def test_code_of_torch_gets_the_truth():
    x = torch.zeros(2, device="cuda")
    assert "cuda" not in repr(x)
    assert copy.deepcopy(x).is_cuda
    assert torch.zeros(2, device="meta").device.type == "meta"
    assert torch.eye(2).to_sparse().cuda().device.type == "cpu", "sparse tensors have no storage to mark"


# torch.cuda


def test_device_queries(monkeypatch):
    assert torch.cuda.is_available()
    assert torch.cuda.device_count() == 1
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    assert torch.cuda.device_count() == 3
    torch.cuda.set_device(torch.device("cuda", 1))
    try:
        with torch.cuda.device(2):
            assert torch.cuda.current_device() == 2
        with torch.cuda.device_of(torch.zeros(1)):
            assert torch.cuda.current_device() == 1
    finally:
        torch.cuda.set_device("cuda:0")
    assert torch.cuda.get_device_capability() >= (7, 0)
    properties = torch.cuda.get_device_properties(0)
    assert properties.total_memory > 0
    assert "cpu" in properties.name.lower()


def test_memory_and_profiling_calls():
    assert torch.cuda.memory_allocated() == torch.cuda.max_memory_allocated() / 2**20 == 0
    assert torch.cuda.memory_stats()["allocated_bytes.all.peak"] == 0
    assert torch.cuda.memory_stats_as_nested_dict()["allocated_bytes"]["all"]["peak"] == 0
    assert torch.cuda.current_stream() == torch.cuda.default_stream(0)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    torch.cuda.nvtx.range_push("forward")
    torch.cuda.nvtx.range_pop()
    with torch.cuda.nvtx.range("backward"):
        torch.cuda.profiler.start()
    assert call_counter.counts()["torch.cuda.nvtx.range"] == 1


def test_streams_and_events():
    stream = torch.cuda.Stream()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        assert torch.cuda.current_stream() is stream
        x = torch.ones(2).pin_memory().cuda(non_blocking=True)
        x.record_stream(torch.cuda.current_stream())
    assert torch.cuda.current_stream() is not stream
    with stream as entered, torch.cuda.Stream() as other, stream:
        assert torch.cuda.current_stream() is entered is stream is not other
    assert torch.cuda.current_stream() is torch.cuda.default_stream()
    stream.wait_event(stream.record_event())
    end.record()
    torch.cuda.synchronize()
    assert stream.query()
    assert 0 <= begin.elapsed_time(end) < 10_000


# Loaders, autocast, parallel wrappers, checkpoints


def test_loader_does_not_pin_memory():
    data = TensorDataset(torch.arange(6.0))
    loader = DataLoader(data, 2, False, None, None, 1, None, True)
    assert not loader.pin_memory
    assert torch.cat([x.cuda() for (x,) in loader]).tolist() == list(range(6))
    assert call_counter.counts()["DataLoader(pin_memory=True)"] == 1


def test_autocast_and_grad_scaler():
    model = nn.Linear(4, 4).cuda()
    optimizer = torch.optim.Adam(model.parameters())
    scaler = torch.cuda.amp.GradScaler()
    assert scaler.is_enabled()
    for context, dtype in (
        (torch.cuda.amp.autocast(), torch.half),
        (torch.autocast("cuda", dtype=torch.bfloat16), torch.bfloat16),
        (torch.amp.autocast(device_type="cuda", enabled=False), torch.float32),
    ):
        with context:
            assert torch.is_autocast_enabled() == (dtype is not torch.float32)
            assert model(torch.ones(2, 4).cuda()).dtype is dtype
    with torch.cuda.amp.autocast():
        loss = F.mse_loss(model(torch.ones(2, 4)).float(), torch.zeros(2, 4))
    before = model.weight.detach().clone()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    assert not torch.equal(model.weight, before)


def test_custom_functions_under_autocast():
    class Double(torch.autograd.Function):
        @staticmethod
        @torch.cuda.amp.custom_fwd(cast_inputs=torch.float32)
        def forward(ctx, x):
            assert x.dtype is torch.float32
            assert not torch.is_autocast_enabled()
            return 2 * x

        @staticmethod
        @torch.cuda.amp.custom_bwd
        def backward(ctx, gradient):
            return 2 * gradient

    x = torch.ones(2, dtype=torch.half, requires_grad=True)
    with torch.cuda.amp.autocast():
        Double.apply(x).sum().backward()
    assert x.grad.tolist() == [2, 2]


def test_float16_products_and_convolutions_are_computed_in_float32():
    """Over the kernels of the CPU, which are far slower and round partial sums differently."""
    torch.manual_seed(0)
    half = torch.float16

    def run(dtype):
        made = iter([torch.randn(s).to(half) for s in ((2, 40, 9, 9), (40, 40, 3, 3), (60, 40), (40, 50), (50,))])
        image, kernel, a, b, bias = tensors = [t.to(dtype).cuda().requires_grad_() for t in made]
        results = [
            F.conv2d(image, kernel, padding=1),
            F.conv_transpose2d(image, kernel),
            a @ b,
            F.linear(a, b.t(), bias),
            a.expand(3, -1, -1) @ b.expand(3, -1, -1),
            torch.baddbmm(a.new_ones(3, 60, 50), a.expand(3, -1, -1), b.expand(3, -1, -1), beta=0.5),
        ]
        grads = [torch.autograd.grad(r.sum(), tensors, allow_unused=True) for r in results]
        return [t for t in (*results, *(g for row in grads[:4] for g in row)) if t is not None]

    torch.manual_seed(0)
    wide = run(torch.float32)
    torch.manual_seed(0)
    for narrow, expected in zip(run(half), wide, strict=True):
        assert narrow.dtype is half
        assert torch.equal(narrow, expected.half())
    assert (torch.full((2, 2), 300.0, dtype=half) @ torch.full((2, 2), 300.0, dtype=half)).isinf().all()


@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing(reentrant):
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Dropout()).cuda(), torch.ones(2, 4, requires_grad=True)
    torch.manual_seed(0)
    checkpoint(model, x, use_reentrant=reentrant).sum().backward()
    ours, x.grad = x.grad, None
    torch.manual_seed(0)
    model(x).sum().backward()
    torch.testing.assert_close(ours, x.grad)


def file_from_cuda():
    """A checkpoint written on a GPU: the location of every storage is cuda:1."""
    file = io.BytesIO()
    torch.save({"weight": torch.arange(3.0), "epoch": 2}, file, _use_new_zipfile_serialization=False)
    return io.BytesIO(file.getvalue().replace(b"X\x03\x00\x00\x00cpu", b"X\x06\x00\x00\x00cuda:1"))


@pytest.mark.parametrize(
    "map_location",
    [
        None,
        "cuda:0",
        torch.device("cuda", 0),
        {"cuda:1": "cuda:0"},
        {"cuda:1": "cpu"},
        {"cuda:5": "cuda:0"},
        lambda storage, location: storage.cuda(0),
        lambda storage, location: storage,
        lambda storage, location: None,
        "cpu",
    ],
    ids=lambda place: "function" if callable(place) else str(place),
)
def test_checkpoint_from_a_gpu_loads(map_location):
    from_cpu = io.BytesIO()
    torch.save({"weight": torch.arange(3.0), "epoch": 2}, from_cpu)
    from_cpu.seek(0)
    from_cuda = file_from_cuda()
    assert b"cuda:1" in from_cuda.getvalue()
    for file in (from_cuda, from_cpu):
        loaded = torch.load(file, map_location=map_location)
        assert loaded["epoch"] == 2
        assert really(loaded["weight"]).type == "cpu"
        assert loaded["weight"].tolist() == [0, 1, 2]
        if map_location in ("cuda:0", "cpu"):
            assert loaded["weight"].is_cuda is (map_location == "cuda:0")
            assert is_copy(lambda x: x.cpu(), loaded["weight"]) is (map_location == "cuda:0")


@torch.jit.script
def _scripted(x):
    return x + torch.ones(2)


def test_torch_jit_script_still_compiles():
    class Added(nn.Module):
        def forward(self, x):
            return x + torch.zeros(2) + torch.arange(2)

    assert torch.jit.script(Added())(torch.ones(2)).tolist() == [1, 2]
    assert _scripted(torch.ones(2)).tolist() == [2, 2]


def in_a_group():
    redirect_cuda()
    dist.init_process_group(backend="nccl", init_method="env://", device_id=torch.device("cuda", 0))
    try:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        group = dist.new_group(ranks=[0, 1], backend="nccl")
        x = torch.full((1,), float(dist.get_rank() + 1)).cuda()
        dist.all_reduce(x, group=group)
        assert dist.new_group([0, 1], None, "nccl", None, False, "named").group_desc == "named"
        torch.manual_seed(dist.get_rank())
        model = nn.parallel.DistributedDataParallel(nn.Linear(1, 1).cuda(), device_ids=[torch.cuda.current_device()])
        model(x).sum().backward()
        dist.barrier(device_ids=[0])
        weight = model.module.weight
        reduced = dist.get_backend(), x.item(), weight.grad.item(), weight.item()

        rows = torch.arange(12.0).view(6, 2)
        layer = nn.SyncBatchNorm.convert_sync_batchnorm(nn.BatchNorm1d(2)).cuda()
        mine = rows[:2] if dist.get_rank() == 0 else rows[2:]
        mine = mine.cuda().requires_grad_()
        out = layer(mine)
        (out * rows[: len(mine)]).sum().backward()
        evaluated = layer.eval()(mine)
        normalized = [t.tolist() for t in (out, mine.grad, layer.running_mean, layer.running_var, evaluated)]
        return reduced, normalized, call_counter.counts()
    finally:
        dist.destroy_process_group()
        harness.apex.uninstall()


def test_nccl_becomes_gloo_and_batch_norm_covers_all_ranks():
    (reduced, first, counts), (other, second, other_counts) = run_ranks(2, in_a_group, group=False)
    assert (reduced, counts) == (other, other_counts)
    assert reduced[:3] == ("gloo", 3.0, 3.0)
    assert {"init_process_group(nccl)", "new_group(nccl)", "barrier(device_ids=)", "SyncBatchNorm"} <= set(counts)
    assert counts["DistributedDataParallel(device_ids=)"] == 1

    harness.apex.uninstall()
    rows, layer = torch.arange(12.0).view(6, 2).requires_grad_(), nn.BatchNorm1d(2)
    out = layer(rows)
    (out * torch.cat([torch.arange(4.0).view(2, 2), torch.arange(8.0).view(4, 2)])).sum().backward()
    expected = (out, rows.grad, layer.running_mean, layer.running_var, layer.eval()(rows))
    for place, both in enumerate(expected):
        parts = (both, both) if place in (2, 3) else (both[:2], both[2:])
        for part, found in zip(parts, (first, second), strict=True):
            torch.testing.assert_close(torch.tensor(found[place]), part.detach())


def test_list_of_redirected_calls():
    assert "no calls were redirected" in call_counter.summary()
    for _ in range(3):
        torch.ones(1).cuda()
    torch.zeros(1, device="cuda")
    torch.zeros(1, device="cpu")
    text = call_counter.summary()
    assert [line.split() for line in text.splitlines()[1:]] == [["3", "Tensor.cuda"], ["1", "torch.zeros(device=cuda)"]]
