"""``--modernize``: every row of its table, and a script that needs a lot of it."""

from __future__ import annotations

import importlib.abc
import importlib.util
import inspect
import sys
import sysconfig

import numpy as np
import pytest
import torch
import torchvision
from torch.utils.data import Sampler

import harness.apex
from harness.apex import call_counter, runner
from harness.apex.modernize import hook, modernize
from harness.apex.modernize.table import NAMES
from tests.apex.test_runner import run, write

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")

# Each fails as it is and passes with --modernize. The key is what the list names, or a part of it.
BRIDGES = {
    "collections.Iterable": """
        import time
        from collections import Iterable, Mapping
        assert isinstance([], Iterable) and issubclass(dict, Mapping) and 0 <= time.clock() <= time.process_time()
    """,
    "inspect.getargspec": """
        import inspect
        spec = inspect.getargspec(lambda a, b=1, *c, **d: 0)
        assert spec == (["a", "b"], "c", "d", (1,)) == (spec.args, spec.varargs, spec.keywords, spec.defaults)
        try: inspect.getargspec(lambda *, a: 0)
        except ValueError: pass
        else: raise AssertionError
    """,
    "StrictVersion('1.2.3+cu118')": """
        import pytest
        StrictVersion = pytest.importorskip("distutils.version").StrictVersion
        assert StrictVersion("1.4") < StrictVersion("2.10.0+cu130") == StrictVersion("2.10.0")
        assert StrictVersion("2.9.0a0+git1234").prerelease == ("a", 0)
        try: StrictVersion("new")
        except ValueError: pass
        else: raise AssertionError
    """,
    "torch.distributed._backend": """
        import torch.distributed as dist
        assert dist._backend not in (dist.dist_backend.NCCL, dist.dist_backend.GLOO)
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        try: assert dist._backend == dist.dist_backend.GLOO == dist.DistBackend.GLOO != dist.dist_backend.NCCL
        finally: dist.destroy_process_group()
    """,
    "json.load(encoding=)": """
        import io, json
        assert json.loads("[1]", encoding="utf-8") == json.load(io.StringIO("[1]"), encoding="utf-8") == [1]
    """,
    "yaml.load without a loader": """
        import yaml
        assert yaml.load("a: [1, !!python/tuple [2]]") == {"a": [1, (2,)]}
        assert list(yaml.load_all("1\\n---\\n2")) == [1, 2]
        try: yaml.load("!!python/object/apply:os.getcwd []")
        except yaml.constructor.ConstructorError: pass
        else: raise AssertionError
    """,
    "numpy.float": """
        import numpy as np
        assert np.zeros(1, np.float).dtype == np.float64 and np.int is int and np.object is object
        assert isinstance("", np.str) and np.zeros(1, dtype=np.bool).dtype == bool
        assert np.Inf == np.PINF == -np.NINF and np.float_ is np.float64 and np.NaN != np.NaN
        assert np.product([2, 3]) == 6 and np.alltrue([1]) and np.round_(2.6) == 3 and np.trapz([1, 1]) == 1
        assert np.asscalar(np.ones((1, 1))) == 1
        assert np.in1d([[1, 2]], [2], invert=True).tolist() == [True, False]
    """,
    "numpy.array of unequal rows": """
        import numpy as np
        x = np.array([[1, 2], [3]])
        assert (x.dtype, x.shape, x[1]) == (object, (2,), [3]) == (np.asarray([[1, 2], [3]]).dtype, (2,), [3])
        assert np.random.choice([(0.1, None), (0.1, None, 1)]) is not None
        y = np.ones(2)
        assert np.array(y, copy=False) is y and np.array(y, copy=False, dtype="f4").dtype == np.float32
    """,
    "numpy.fromstring of bytes": """
        import numpy as np
        x = np.fromstring(b"\\1\\2\\3", np.uint8, 2)
        x += 1
        assert x.tolist() == [2, 3] and np.fromstring("1 2", sep=" ").tolist() == [1, 2]
    """,
    "numpy.linspace with a float": """
        import numpy as np
        assert len(np.linspace(0.5, 0.95, np.round(0.45 / 0.05) + 1)) == 10
    """,
    "Tensor.view of a non-contiguous bool tensor": """
        import torch
        output, target = torch.eye(8), torch.arange(8)
        correct = output.topk(5)[1].t().eq(target.view(1, -1).expand(5, 8))
        assert correct[:1].contiguous().view(-1).float().sum() == 8 == correct[:3].view(-1).float().sum(0, keepdim=True)
        try: torch.ones(3, 2).t().view(-1)
        except RuntimeError: pass
        else: raise AssertionError("a view of other tensors would not be one")
    """,
    "Tensor.masked_fill with a uint8 mask": """
        import torch
        mask = torch.tensor([1, 0], dtype=torch.uint8)
        x = torch.zeros(2).masked_fill_(mask, 3)
        assert x.tolist() == [3, 0] == torch.zeros(2).masked_fill(mask=mask, value=3).tolist()
        assert torch.masked_fill(torch.zeros(2), mask, 3).tolist() == [3, 0]
        value = torch.tensor(255, dtype=torch.uint8)
        assert torch.zeros(2).masked_fill(mask, value).tolist() == [255, 0]
        image = torch.zeros(2, dtype=torch.uint8)
        assert image.masked_scatter(mask, source=value.view(1)).tolist() == [255, 0]
        assert x.masked_select(mask).tolist() == [3] == torch.masked_select(x, mask).tolist()
        assert x.masked_scatter_(mask, torch.ones(1)).tolist() == [1, 0]
        assert x.masked_scatter(mask, torch.ones(1)).tolist() == [1, 0] == torch.masked_scatter(x, mask, x).tolist()
    """,
    "subtraction of a bool tensor": """
        import torch
        x = 1 - (torch.arange(2) > 0)
        assert (x.tolist(), x.dtype) == ([1, 0], torch.uint8) and (1 - torch.ones(1)).item() == 0
    """,
    "integer betas of Adam": """
        import torch
        p = torch.nn.Parameter(torch.ones(1))
        assert torch.optim.Adam((each for each in [p]), betas=(0, 0.999)).param_groups[0]["betas"] == (0.0, 0.999)
        assert torch.optim.AdamW([p], 0.1, (0, 0.9)).param_groups[0]["betas"] == (0.0, 0.9)
    """,
    "ReduceLROnPlateau(verbose=)": """
        import torch
        from torch.optim import lr_scheduler
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], 1.0)
        assert lr_scheduler.ReduceLROnPlateau(optimizer, patience=7, verbose=True).patience == 7
        scheduler = lr_scheduler.ReduceLROnPlateau(optimizer, "min", 0.5, 3, True, 0.25)
        assert (scheduler.patience, scheduler.threshold) == (3, 0.25)
        scheduler = lr_scheduler.ReduceLROnPlateau(optimizer, "min", 0.5, 3, False, 0.25, "abs", 2, 0.1, 0.125)
        assert (scheduler.threshold_mode, scheduler.cooldown, scheduler.eps) == ("abs", 2, 0.125)

        class Plateau(lr_scheduler.ReduceLROnPlateau):
            pass

        assert Plateau(optimizer, "min", 0.5, 3, True, 0.25).threshold == 0.25

        class Own(lr_scheduler.LRScheduler):
            def __init__(self, optimizer, last_epoch=-1, verbose=False):
                super().__init__(optimizer, last_epoch, verbose)

            def get_lr(self):
                return [2.0]

        assert Own(optimizer).get_last_lr() == [2.0] and lr_scheduler.StepLR(optimizer, 3, verbose=False).step_size == 3
    """,
    "Sampler(data_source)": """
        from torch.utils.data import Sampler

        class Own(Sampler):
            def __init__(self, data):
                super().__init__(data)

        Own([1])
        Sampler(None)

        class Base:
            def __init__(self, size=None):
                self.size = size

        class Both(Sampler, Base):
            pass

        assert (Both().size, Both(size=3).size, Both(4).size) == (None, 3, 4)
    """,
    "torch.utils.data.dataloader._BaseDataLoaderIter.next": """
        import torch
        batches = iter(torch.utils.data.DataLoader([1, 2]))
        assert [batches.next().item(), batches.next().item()] == [1, 2]
    """,
    "torch._six": """
        import collections.abc, math
        from torch._six import container_abcs, inf, int_classes, string_classes
        from torch.utils.data._utils import collate
        from torch.utils.data.dataset import T_co
        import torch._six
        assert isinstance("", string_classes) and isinstance(1, int_classes) and inf == math.inf
        assert container_abcs is collections.abc is collate.container_abcs and torch._six.PY3 and T_co.__covariant__
    """,
    "torchvision.models.utils.load_state_dict_from_url": """
        import torch
        from torchvision.models.utils import load_state_dict_from_url
        from torch.utils.model_zoo import _download_url_to_file
        assert load_state_dict_from_url is torch.hub.load_state_dict_from_url
        assert torch.hub._download_url_to_file is _download_url_to_file is torch.hub.download_url_to_file
    """,
    "torchvision.models.resnet.model_urls": """
        from torchvision.models.resnet import model_urls
        from torchvision.models.mobilenet import model_urls as mobile
        import torchvision.models.vgg as vgg
        assert "resnet18" in model_urls and model_urls["resnet50"].endswith("resnet50-0676ba61.pth")
        assert "resnet18" not in vgg.model_urls and "vgg16_bn" in vgg.model_urls and list(mobile) == ["mobilenet_v2"]
        assert "shufflenet_v2_x1_0" not in model_urls and "wide_resnet50_2" in model_urls
    """,
    "torchvision.transforms.Scale": """
        import torch
        from PIL import Image
        from torchvision import transforms
        from torchvision.transforms.functional_tensor import rgb_to_grayscale
        image = Image.new("RGB", (8, 16))
        assert transforms.Scale(4)(image).size == (4, 8) and transforms.RandomSizedCrop(4)(image).size == (4, 4)
        assert rgb_to_grayscale(torch.ones(3, 2, 2)).shape == (1, 2, 2)
    """,
    "torchvision rotate(resample=)": """
        import torchvision.transforms.functional as F
        from PIL import Image
        from torchvision import transforms
        image = Image.linear_gradient("L")
        now = F.rotate(image, 30, interpolation=F.InterpolationMode.BILINEAR)
        assert F.rotate(image, 30, resample=Image.BILINEAR) == now != F.rotate(image, 30, resample=False)
        transform = transforms.RandomAffine(5, fillcolor=3, resample=2)
        assert (transform.fill, transform.interpolation) == (3, F.InterpolationMode.BILINEAR)
        assert transforms.RandomRotation(5, resample=3).interpolation == F.InterpolationMode.BICUBIC
        now = F.affine(image, 5, (0, 0), 1, (0.0,), fill=0)
        assert F.affine(image, 5, (0, 0), 1, (0.0,), resample=0, fillcolor=0) == now
    """,
    "torchvision make_grid(range=)": """
        import torch, torchvision
        x = torch.linspace(-1, 1, 12).view(1, 3, 2, 2)
        assert torch.equal(torchvision.utils.make_grid(x, normalize=True, range=(-1, 1)), (x[0] + 1) / 2)
    """,
    "torchvision.ops.misc": """
        import torch
        from torchvision.ops import _new_empty_tensor
        from torchvision.ops.misc import _output_size
        assert _new_empty_tensor(torch.ones(1), [0, 3]).shape == (0, 3)
        assert _output_size(2, torch.ones(1, 1, 5, 4), None, 1.5) == [7, 6]
    """,
    "PIL.Image.ANTIALIAS": """
        from PIL import PILLOW_VERSION, Image
        assert Image.ANTIALIAS == Image.LANCZOS == 1 and Image.LINEAR == 2 and Image.CUBIC == 3
        assert Image.PILLOW_VERSION == PILLOW_VERSION
    """,
    "PIL.ImageFont.FreeTypeFont.getsize": """
        from PIL import Image, ImageDraw, ImageFont
        font, draw = ImageFont.load_default(), ImageDraw.Draw(Image.new("L", (99, 99)))
        width, height = font.getsize("label")
        assert width > height > 5
        draw.text((0, 0), "label", fill=255, font=font)
        assert (draw._image.getbbox()[2] - width, draw._image.getbbox()[3]) in [(d, height) for d in range(-2, 2)]
        assert ImageFont.load_default_imagefont().getsize("ab") == (12, 11)
    """,
    "matplotlib.backends.backend_agg.FigureCanvasAgg.tostring_rgb": """
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        canvas = FigureCanvasAgg(Figure(figsize=(1, 1), dpi=10, facecolor="red"))
        canvas.draw()
        assert canvas.tostring_rgb() == bytes([255, 0, 0]) * 100
    """,
    "scipy.misc.imresize": """
        import numpy as np
        from scipy.misc import imresize
        image = np.arange(48, dtype=np.uint8).reshape(4, 4, 3)
        assert imresize(image, (2, 8)).shape == (2, 8, 3) and imresize(image, 50).shape == imresize(image, 0.5).shape
        assert (imresize(image, (8, 8), "nearest") == image.repeat(2, 0).repeat(2, 1)).all()
        assert imresize(image.transpose(2, 0, 1), (4, 4)).tolist() == image.tolist()
        assert imresize(image[..., 0], (4, 4), mode="F").dtype == np.float32
        assert imresize(np.array([[0.0, 1.0, 2.0]]), (1, 3)).tolist() == [[0, 128, 255]]
    """,
}


@pytest.fixture
def undone():
    yield
    harness.apex.uninstall()
    call_counter.reset(call_counter.MODERNIZE)


@pytest.mark.parametrize("name", BRIDGES)
def test_bridge(name, undone, tmp_path, monkeypatch):
    if name.startswith("matplotlib"):
        pytest.importorskip("matplotlib")
    if name.startswith("Sampler") and "__init__" in vars(Sampler):
        pytest.skip("the installed torch still has Sampler.__init__")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delattr("numpy.Inf", raising=False)  # torchmetrics sets it when it is imported
    path = write(tmp_path, "train.py", BRIDGES[name])
    code = compile(path.read_text(), path, "exec")
    try:
        exec(code, {"__name__": "train"})
    except (AttributeError, ImportError, TypeError, ValueError, RuntimeError):
        pass
    else:
        pytest.skip(f"the installed versions still have {name}")
    modernize()
    exec(code, {"__name__": "train"})
    counted = call_counter.counts(call_counter.MODERNIZE)
    assert any(label.startswith(name) for label in counted), counted


def test_every_name_of_the_table_means_something(undone, monkeypatch):
    """Also those that the bridges above do not use; a library that is not installed is left out."""
    modernize()
    checked = 0
    for path, names in NAMES.items():
        module, _, of_class = path.partition(":")
        if importlib.util.find_spec(module.partition(".")[0]) is None:
            assert module.partition(".")[0] not in sys.modules
            continue  # see the next test
        owner = importlib.import_module(module)
        owner = getattr(owner, of_class) if of_class else owner
        for name in names:
            if (name, sys.version_info < (3, 14)) != ("ByteString", False):
                assert getattr(owner, name) is not None, (path, name)
                checked += 1
    assert checked > 100
    harness.apex.uninstall()
    for absent in ("torch._six", "torchvision.models.utils"):
        assert absent not in sys.modules
    assert not hasattr(np, "float")
    assert not hasattr(torchvision.models, "utils")


def test_libraries_imported_later(tmp_path, monkeypatch, undone):
    """The table is applied after a module has run; one that replaces itself, and one that is gone, are found."""
    write(tmp_path, "old_library/__init__.py", "new = 1")
    write(
        tmp_path,
        "lazy_library/__init__.py",
        """
        import sys, types
        class Lazy(types.ModuleType):
            def __getattr__(self, name):
                raise AttributeError(f"module {self.__name__} has no attribute {name}")
        lazy = Lazy(__name__)
        lazy.__spec__ = __spec__
        sys.modules[__name__] = lazy
        """,
    )
    rows = {"lazy_library": {"old": "old_library:new"}, "old_library.gone": {"old": "old_library:new"}}
    monkeypatch.setattr(hook, "NAMES", {**NAMES, **rows})
    monkeypatch.setattr(hook, "_MODULES", hook._MODULES | set(rows))
    modernize()
    with pytest.raises(ModuleNotFoundError):  # by which scripts do without a library
        importlib.import_module("lazy_library")
    monkeypatch.syspath_prepend(str(tmp_path))

    class Other(importlib.abc.MetaPathFinder):
        """A finder that asks all others, as import hooks of other libraries do."""

        def find_spec(self, name, path=None, target=None):
            if name == "old_library":  # looks for another library on the way
                self.find_spec("lazy_library")
            others = [finder for finder in sys.meta_path if finder is not self]
            return next(filter(None, (finder.find_spec(name, path, target) for finder in others)), None)

    monkeypatch.setattr(sys, "meta_path", [Other(), *sys.meta_path])
    for name in ("old_library", "lazy_library", "old_library.gone"):
        monkeypatch.setitem(sys.modules, name, sys)  # what the test imports is forgotten at its end
        del sys.modules[name]
    modernize()
    assert not {"old_library", "lazy_library"} & set(sys.modules), "nothing is imported before the script does it"
    from lazy_library import old
    from old_library.gone import old as gone

    assert old == gone == 1
    assert inspect.getsource(sys.modules["old_library"]) == "new = 1\n"


def test_installed_libraries_keep_the_errors_of_today(undone):
    modernize()
    code = compile("import numpy\nnumpy.array([[1, 2], [3]])", "/x/site-packages/library.py", "exec")
    with pytest.raises(ValueError, match="inhomogeneous"):
        exec(code, {})
    if np.lib.NumpyVersion(np.__version__) >= "2.0.0":  # before, it copied without a word
        code = compile("import numpy\nnumpy.array([1], copy=False)", sysconfig.get_paths()["stdlib"] + "/x.py", "exec")
        with pytest.raises(ValueError, match="copy"):
            exec(code, {})
    with pytest.raises(AttributeError, match="module 'numpy' has no attribute 'floot'"):
        np.floot  # noqa: B018
    with pytest.raises(ValueError, match="could not broadcast|sequence"):
        np.array([[1, 2], [3]], dtype=float)


def test_a_script_that_needs_it_is_told(tmp_path):
    """Only for what it restores, and not if it was given."""
    hint = "harness.apex: try --modernize before the script, which restores this\n"
    write(tmp_path, "train.py", "import numpy\nnumpy.float")
    assert run("-m", "harness.apex", "train.py", cwd=tmp_path).stderr.endswith(hint)
    write(tmp_path, "other.py", "import numpy\nnumpy.floot")
    found = [run("-m", "harness.apex", *words, "other.py", cwd=tmp_path).stderr for words in ((), ("--modernize",))]
    assert ["floot" in text and hint not in text for text in found] == [True, True]
    for error, told in (
        (ImportError("cannot import name 'Iterable' from 'collections' (collections/__init__.py)"), True),
        (ModuleNotFoundError("No module named 'torch._six'", name="torch._six"), True),
        (ModuleNotFoundError("No module named 'torch._seven'", name="torch._seven"), False),
        (AttributeError("`np.Inf` was removed in NumPy 2.0", name="Inf", obj=np), True),
        (AttributeError("'NoneType' object has no attribute 'clock'", name="clock", obj=None), False),
    ):
        assert runner._is_removed(error) is told, error


def test_scripting_is_not_disturbed(undone):
    modernize()

    @torch.jit.script
    def clipped(x: torch.Tensor) -> torch.Tensor:
        return torch.masked_fill(x.view(-1), x > 9, 1.0)

    assert torch.equal(clipped(torch.tensor([1.0, 10.0])), torch.ones(2))
    rotated = torch.jit.script(torchvision.transforms.RandomRotation((90.0, 90.0)))(torch.eye(4)[None])
    assert torch.equal(rotated[0], torch.eye(4).flip(0))
