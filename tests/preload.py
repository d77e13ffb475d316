"""Imported once by the fork server of tests.ranks, instead of by every rank: whatever a verb of the harness needs."""

import atexit
import gc
import importlib
import itertools
import pkgutil
from contextlib import suppress

import harness
from harness.config import loader, plugins
from harness.runs import provenance

gc.disable()  # as in ``harness train``

for module in pkgutil.walk_packages(harness.__path__, "harness."):
    # What these import is slow or starts threads.
    if not module.name.startswith(
        ("harness.engines.", "harness.trackers.", "harness.tools.sweep.", "harness.__main__")
    ):
        with suppress(ImportError):  # an extra that is not installed
            importlib.import_module(module.name)

# What the harness and libraries import late, and the modules of the ranks' functions.
for name in (
    "encodings.idna",
    "encodings.utf_8_sig",
    "harness.engines.launch_command",
    "harness.tools.sweep.command",
    "harness.tools.sweep.main",
    "harness.tools.sweep.runner",
    "harness.tools.sweep.schema_command",
    "multiprocessing.synchronize",
    "numpy.ctypeslib",
    "pandas.io.formats.csvs",
    "pyarrow.pandas_compat",
    "pyarrow.vendored.version",
    "tests.end_to_end.experiment",
    "tests.fixtures",
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "torch.utils._sympy.reference",
    "torch.utils.flop_counter",
    "torch.utils.serialization",
    "torchvision.transforms.v2",
):
    with suppress(ImportError):
        importlib.import_module(name)

provenance.harness_source()  # takes a tenth of a small training, as does the following
for package in provenance.PACKAGES:
    provenance.version(package)
schedules = [loader.schedule_class({"name": name}) for name in ("constant", "cosine")]
for task, schedule in itertools.product(plugins.names("task"), schedules):
    loader.config_class(plugins.find("task", task, "task.name"), schedule)

gc.freeze()  # a collection in a rank would copy the memory that it shares with the server
gc.enable()
atexit.register(gc.unfreeze)  # or libraries report leaks
