"""Task image_csv: config.py is its section of the YAML, task.py has the rest."""
