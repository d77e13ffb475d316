"""Scripts of the Apex era: ``harness port`` reports what a script uses of Apex, and rewrites its imports to
``harness.apex``. It does not run the script.

Start at ``command.py``. ``uses.py`` reads the script, ``imports.py`` rewrites it.
"""
