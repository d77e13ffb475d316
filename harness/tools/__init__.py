"""The commands around training: one package for each, such as ``harness compare`` or ``harness sweep``.

Not here: ``train``, ``launch``, ``data``, ``predict`` and the others that belong to the package whose code they run. Nothing
outside this folder imports it. Start at the ``command.py`` of the command.
"""
