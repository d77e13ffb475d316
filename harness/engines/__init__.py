"""Where ranks are started: one file an engine. Each starts ``driver.py`` somewhere and brings its results and
failures home."""
