"""The update of the weights: optimizers, learning rate, gradients and mixed precision.

Not here: Apex's fused optimizers and loss scaler (harness/apex), or the exchange of gradients (training/strategies).
Start at optimizer_builder.py.
"""
