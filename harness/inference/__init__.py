"""Uses of a trained model: predict the rows of a file, export to other formats.

Not here: evaluation during training, and writing predictions (training/evaluation).
Start at predict.py; each verb has its own VERB_command.py.
"""
