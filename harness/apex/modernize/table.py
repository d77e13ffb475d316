"""Everything that ``--modernize`` restores: ``NAMES`` that are gone, and ``CALLS`` that are refused.

The first release without a name is in each row, for the documentation and for suggestions; a name or call that the
installed version still has is left alone.
"""

from __future__ import annotations

import sys

from harness.apex.modernize import arrays, python, torch_calls, vision
from harness.apex.modernize.rows import OURS, Call, Names

__all__ = ["CALLS", "NAMES", "Names"]

NAMES = [
    Names(
        "collections",
        "Python 3.10",
        "Awaitable Coroutine AsyncIterable AsyncIterator AsyncGenerator Hashable Iterable Iterator Generator "
        "Reversible Sized Container Callable Collection Set MutableSet Mapping MutableMapping MappingView KeysView "
        "ItemsView ValuesView Sequence MutableSequence ByteString",
        "collections.abc",
    ),
    Names("time", "Python 3.8", f"clock={'perf_counter' if sys.platform == 'win32' else 'process_time'}"),
    Names("fractions", "Python 3.9", "gcd", f"{OURS}.python"),
    Names("threading:Thread", "Python 3.9", "isAlive=is_alive"),
    Names("base64", "Python 3.9", "encodestring=encodebytes decodestring=decodebytes"),
    Names("inspect", "Python 3.11", "getargspec ArgSpec", f"{OURS}.python"),
    Names("imp", "Python 3.12", "load_source new_module=types.ModuleType reload=importlib.reload", f"{OURS}.python"),
    Names("numpy", "numpy 1.23", "alen asscalar loads=pickle.loads", f"{OURS}.arrays"),
    Names("numpy", "numpy 1.24", "bool complex float int object str long=int unicode=str", "builtins"),
    Names(
        "numpy",
        "numpy 2.0",
        "Inf=inf Infinity=inf infty=inf PINF=inf NaN=nan float_=float64 complex_=complex128 cfloat=complex128 "
        "singlecomplex=complex64 longfloat=longdouble longcomplex=clongdouble clongfloat=clongdouble string_=bytes_ "
        "unicode_=str_ bool8=bool_ int0=intp uint0=uintp object0=object_ str0=str_ bytes0=bytes_ round_=round "
        "product=prod cumproduct=cumprod sometrue=any alltrue=all mat=asmatrix row_stack=vstack typeDict=sctypeDict",
    ),
    Names("numpy", "numpy 2.0", "NINF NZERO PZERO asfarray cast msort math", f"{OURS}.arrays"),
    Names("numpy", "numpy 2.4", "in1d", f"{OURS}.arrays"),
    Names("numpy", "numpy 2.4", "trapz=trapezoid"),
    Names("numpy.lib", "numpy 2.0", "pad", "numpy"),
    Names("torch.distributed", "torch 1.1", "dist_backend=Backend DistBackend=Backend"),
    Names("torch.distributed", "torch 1.1", "_backend", f"{OURS}.torch_calls"),
    Names("torch", "torch 1.8", "rfft irfft ifft", f"{OURS}.torch_math"),
    Names("torch:Tensor", "torch 1.8", "rfft irfft fft ifft", f"{OURS}.torch_math"),
    Names(
        "torch._six",
        "torch 2.0",
        "string_classes int_classes container_abcs=collections.abc inf=math.inf nan=math.nan PY3 PY37",
        f"{OURS}.torch_calls",
    ),
    Names(
        "torch.utils.data._utils.collate",
        "torch 1.8 to 2.0",
        "string_classes int_classes container_abcs=collections.abc",
        f"{OURS}.torch_calls",
    ),
    *[
        Names(f"torch.utils.data.{each}", "torch 2.x", "T_co=_T_co")
        for each in ("dataset", "sampler", "dataloader", "distributed")
    ],
    Names("torch.utils.data.dataloader:_BaseDataLoaderIter", "torch 1.13", "next=__next__"),
    *[
        Names(each, "torch 1.2", "_download_url_to_file=download_url_to_file", "torch.hub")
        for each in ("torch.hub", "torch.utils.model_zoo")
    ],
    Names("torchvision.transforms", "torchvision 0.12", "Scale=Resize RandomSizedCrop=RandomResizedCrop"),
    Names(
        "torchvision.transforms.functional_tensor", "torchvision 0.17", "*", "torchvision.transforms._functional_tensor"
    ),
    Names("torchvision.models.utils", "torchvision 0.13", "load_state_dict_from_url", "torch.hub"),
    *[
        Names(f"torchvision.models.{each}", "torchvision 0.13", f"model_urls=urls_of_{each}", f"{OURS}.vision")
        for each in vision.WITH_URLS
    ],
    Names("torchvision.ops", "torchvision 0.10", "_new_empty_tensor", f"{OURS}.vision"),
    Names("torchvision.ops.misc", "torchvision 0.10", "_new_empty_tensor _output_size", f"{OURS}.vision"),
    Names("torchvision.ops.misc", "torchvision 0.10", "Conv2d ConvTranspose2d BatchNorm2d", "torch.nn"),
    Names("torchvision.ops.misc", "torchvision 0.10", "interpolate", "torch.nn.functional"),
    Names("torchvision.datasets.utils", "torchvision 0.7", "makedir_exist_ok", f"{OURS}.vision"),
    Names("PIL", "Pillow 7", "PILLOW_VERSION=__version__"),
    Names("PIL.Image", "Pillow 7", "PILLOW_VERSION=__version__"),
    Names("PIL.Image", "Pillow 10", "ANTIALIAS=LANCZOS LINEAR=BILINEAR CUBIC=BICUBIC"),
    Names("PIL.ImageFont:ImageFont", "Pillow 10", "getsize", f"{OURS}.media"),
    Names("PIL.ImageFont:FreeTypeFont", "Pillow 10", "getsize", f"{OURS}.media"),
    Names("PIL.ImageDraw:ImageDraw", "Pillow 10", "textsize", f"{OURS}.media"),
    Names("matplotlib.cm", "matplotlib 3.11", "get_cmap", f"{OURS}.media"),
    Names("matplotlib.backends.backend_agg:FigureCanvasAgg", "matplotlib 3.10", "tostring_rgb", f"{OURS}.media"),
    Names("matplotlib.backends.backend_agg:RendererAgg", "matplotlib 3.10", "tostring_rgb", f"{OURS}.media"),
    Names("scipy.misc", "scipy 1.3", "bytescale fromimage imread imresize imsave toimage", f"{OURS}.media"),
    Names("scipy.misc", "scipy 1.3", "comb factorial logsumexp", "scipy.special"),
    Names("scipy.integrate", "scipy 1.14", "trapz=trapezoid cumtrapz=cumulative_trapezoid"),
    Names(
        "scipy.signal",
        "scipy 1.13",
        "barthann bartlett blackman blackmanharris bohman boxcar chebwin cosine exponential flattop gaussian "
        "general_gaussian hamming hann kaiser nuttall parzen triang tukey",
        "scipy.signal.windows",
    ),
    Names("pandas:DataFrame", "pandas 2.0", "append=append_to_frame", f"{OURS}.frames"),
    Names("pandas:Series", "pandas 2.0", "append=append_to_series", f"{OURS}.frames"),
    Names("pandas:DataFrame", "pandas 1.0", "as_matrix", f"{OURS}.frames"),
    Names("pandas:DataFrame", "pandas 2.0", "iteritems=items"),
    Names("pandas:Series", "pandas 2.0", "iteritems=items"),
    Names("pandas:DataFrame", "pandas 3.0", "applymap=map"),
    Names("sklearn.externals", "scikit-learn 0.23", "joblib=joblib:"),
    Names("librosa", "librosa 0.8", "output=librosa.output"),
    Names("librosa.output", "librosa 0.8", "write_wav", f"{OURS}.media"),
    Names("transformers", "transformers 4.0", "logger", f"{OURS}.python"),
]

CALLS: list[Call] = [*python.CALLS, *arrays.CALLS, *torch_calls.CALLS, *vision.CALLS]
