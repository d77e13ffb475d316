"""``harness sweep``: one experiment trained many times, over a space of settings.

``spec`` and ``file`` are the sweep file, ``conflicts`` what cannot stand together in it, ``space`` the trials that come
of it, ``comparability`` what of them cannot be compared, ``plan`` all of that with the machine it is to run on.
``study`` keeps the state in Optuna's storage, ``process`` is a trial that runs, ``runner`` runs them all; ``board``
shows them, ``results`` leaves ``sweep.json``; ``main`` ties it together. Nothing of training is imported here: a
trial is a process of its own, and its run folder tells how it went.
"""
