"""Built-in models, one file each: the file name is the name in the YAML, and the file holds ``Model``.

Every model is a plain nn.Module in float32, without amp or DDP.
Not here: precision (training/optimizer) or the wrapper of a parallel strategy (training/strategies).
Start at model_builder.py, which builds a model by its name. weights.py, compiled.py and recompute.py are the
other things that a run does with any model.
"""
