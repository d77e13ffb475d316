"""Uses of a trained model: predict the rows of a table, generate names, export to other formats.

Not here: evaluation during training (training/evaluate.py).
Start at predict.py; prediction_writer.py makes the table, for training runs too.
"""
