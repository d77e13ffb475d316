"""Task pet_names: config.py is its section of the YAML, task.py has the rest."""
