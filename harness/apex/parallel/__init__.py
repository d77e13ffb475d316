"""Data parallelism under the names of Apex's ``parallel``; wrap after ``amp.initialize``.

``LARC`` is a module, as in Apex, that can be used as the class in it. Start reading at ``distributed``.
"""

from __future__ import annotations

from torch.distributed import ReduceOp

from harness.apex.parallel import LARC
from harness.apex.parallel.distributed import DistributedDataParallel, Reducer
from harness.apex.parallel.sync_batchnorm import SyncBatchNorm, convert_syncbn_model, create_syncbn_process_group

__all__ = [
    "LARC",
    "DistributedDataParallel",
    "ReduceOp",
    "Reducer",
    "SyncBatchNorm",
    "convert_syncbn_model",
    "create_syncbn_process_group",
]
