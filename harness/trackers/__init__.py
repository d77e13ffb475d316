"""Where numbers go: the record of a run, ``metrics.jsonl``, which is always written, and the tools that mirror it.

One file a tool; the file name is its name in the YAML's ``trackers:``, and it defines ``Mirror`` (see mirror.py). To
add one is to write that file and to add the word in ``harness.config.schema``.
"""
