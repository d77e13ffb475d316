"""The commands around training: one package for each, such as ``harness compare`` or ``harness sweep``.

Not here: ``train``, ``launch``, ``predict`` and others, which belong to the package whose code they run.
Nothing outside this folder imports from it. Start at the ``command.py`` of a package.
"""
