"""The model of a run: built by its name, with given weights, LoRA, activation checkpointing and compilation.

Not here: precision (training/optimizer) and how ranks share a model (training/strategies).
Start at model_builder.py; built_in/ has the models of the harness, libraries/ those of other packages.
"""
