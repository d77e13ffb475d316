"""NVIDIA's own Apex and ``harness.apex`` side by side on the CPU, bit for bit.

``make oracle APEX_CHECKOUT=DIR`` runs every cell of ``cells`` twice on the same kernels: with the ``apex`` in a
checkout of NVIDIA's repository that still has amp (any tag up to 25.05), and with ``harness.apex`` installed as
``apex``. Nothing of the original is part of this repository.

``original`` makes the checkout importable without a GPU, ``side`` runs the cells of one of the two, ``verdict``
compares, ``deliberate`` lists the differences that are meant to be.
"""
