"""One file per task; the file name is the task's name in the YAML."""
