"""Task mnist: settings.py is its section of the YAML, config.py opens its data, task.py has the rest."""
