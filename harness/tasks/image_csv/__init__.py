"""Task image_csv: config.py is its section of the YAML, task.py its data, model and metrics (imports torch)."""
