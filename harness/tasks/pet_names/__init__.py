"""Task pet_names: config.py is its section of the YAML, task.py its data, model and metrics (imports torch)."""
