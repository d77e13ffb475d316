"""Scripts of the Apex era: ``harness port`` reports what a script uses of Apex, without running it.

Start at ``command.py``. ``uses.py`` reads the script.
"""
