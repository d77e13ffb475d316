"""Built-in models, one file each: the file name is the name in the YAML, and the file holds ``Model``.

Every model is a plain nn.Module in float32, without amp or DDP.
Not here: what a run does with any model (training/model), or precision (training/optimizer).
"""
