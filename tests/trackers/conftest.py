"""Settings of the trackers for every test here: no account, no network, no file of the user."""

from __future__ import annotations

import os
import sys

import pytest

TOOLS = {
    "WANDB_API_KEY": None,
    "WANDB_MODE": None,
    "WANDB_DIR": None,
    "WANDB_PROJECT": None,
    "MLFLOW_TRACKING_URI": None,
    "MLFLOW_EXPERIMENT_NAME": None,
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "WANDB_ERROR_REPORTING": "false",
}


@pytest.fixture(autouse=True)
def no_account(monkeypatch, tmp_path):
    for name, value in TOOLS.items():
        if value is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, value)
    monkeypatch.setenv("NETRC", str(tmp_path / "no-netrc"))
    for name in ("WANDB_SERVICE", "WANDB_DATA_DIR"):
        monkeypatch.delenv(name, raising=False)
    yield
    # W&B starts a service process and stores its address in the environment.
    if "wandb" in sys.modules:
        sys.modules["wandb"].teardown()
    for name in ("WANDB_SERVICE", "WANDB_DATA_DIR"):
        os.environ.pop(name, None)
