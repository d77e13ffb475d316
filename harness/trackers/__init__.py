"""The metrics log of a run, ``metrics.jsonl``, and the trackers that mirror it: TensorBoard, Weights & Biases, MLflow.

A tracker is one file here: its name is the word for ``trackers:`` in the YAML, and it defines a class ``Tracker``.
Start at metrics_log.py; base.py has the protocol of a tracker, forwarder.py the thread that each one runs on.
"""
