"""What a model's outputs are worth: losses, metrics, the exact evaluation of all rows, and predictions in a file.

Not here: the task, which chooses its loss and metrics (harness/tasks), or commands about trained models (inference).
Start at objective.py, which has losses.py and labels.py, and at evaluate.py for the pass over the rows.
"""
