"""Reports of runs and sweeps: files in, files out; nothing in training knows of it. ``command`` is the way in."""
