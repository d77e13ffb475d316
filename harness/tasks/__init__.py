"""One file per task; the file name is the task's name in the YAML.

A file defines ``Task``, a ``TaskSection`` whose fields are the ``task:`` section of the YAML, with

    Task.metrics             {name of an evaluation metric: "max" or "min"}, the deciding one first
    Task.open(seed, cache_dir) -> Opened

and what it opens has

    train, eval              datasets: len() and batch(rows, epoch) -> Batch; raw and whole, sharding is not their work
    summary                  {what: value} to tell the user: rows, classes, ...
    notes                    sentences about what is odd in the data, though it can be used
    fingerprint              the same on two nodes if and only if they read the same data
    label_counts(start, stop) how often each class occurs in these training rows, or None
    model(section)           the nn.Module, on the CPU, in float32, not wrapped
    prepare(inputs)          a batch as the loader delivers it -> what the model takes, on the device
    loss(outputs, targets)   mean over the batch
    evaluate(outputs, targets) -> {name: (sum, count)}, tensors; never means
    report(sums)             {name: value} of the reduced sums that are not plain ratios, such as a confusion matrix

A task whose predictions make a table, a row of it for each row of `eval`, also has

    predictions(outputs)     {column: a value a row}: prediction, scores; text, numbers or tensors (batch,)
    known(rows)              {column: a value a row} of what is known of these rows of `eval`: id, and label

and if it can predict rows of another file (`harness predict`), without the data it was trained on,

    learned                  what it took from the training data, as JSON: the classes, say; kept in the run folder
    Task.open_new(learned, source, cache_dir) -> Opened    whose `eval` is that file; there is no `train`

What `harness export` writes beside a model is

    signature                {"input": name, "output": name, "classes": [...], "preprocessing": {...}}; all optional

Ours keep what they open in ``opened``: a launcher, which reads a YAML for its ranks, then does so without torch.
Nothing here knows about ranks, amp or checkpoints.
"""
