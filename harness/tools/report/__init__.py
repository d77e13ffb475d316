"""``harness report``: one page about runs and sweeps.

It reads run folders (``harness.runs.reader``) and needs neither torch nor the training code. Start at page.py;
run_set.py holds the runs side by side, sections.py decides which figures (figures.py) and tables (tables.py) it shows.
"""
