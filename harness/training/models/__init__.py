"""Built-in models, one file each: the file name is the name in the YAML, and the file holds ``Model``.

Every model is a plain nn.Module in float32, without amp or DDP. ``harness.training.model_builder`` builds them.
"""
