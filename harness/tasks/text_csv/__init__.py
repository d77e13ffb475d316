"""Task text_csv: config.py is its section of the YAML; task.py has its data and model, and imports torch."""
