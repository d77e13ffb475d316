"""``harness verify-resume -- COMMAND``: whether an unmodified script resumes exactly, and what is wrong if not.

Start at audit.py: it starts the command several times (starts.py), each time in fresh folders (folders.py), kills it at
a chosen moment (kills.py) and compares what the recorder in hook/ wrote (diagnosis.py).
"""
