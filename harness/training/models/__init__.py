"""Built-in models, one file each: the file name is the name in the YAML, and the file holds ``Model``.

Every model is a plain nn.Module in float32, without amp or DDP.
Not here: what a run does with any model: training/model_builder.py, which builds it by its name, weights.py,
compiled.py, recompute.py and lora.py; precision (training/optimizer); parallel strategies (training/strategies).
"""
