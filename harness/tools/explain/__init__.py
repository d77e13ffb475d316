"""``harness explain``: why a run is slow, in one to three sentences, with the setting to change.

It only reads the run folder, and measures at most two things on this machine. Start at causes.py, the table of causes;
facts.py reads the run and measures what it lacks.
"""
