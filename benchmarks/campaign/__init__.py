"""Kills training runs at random moments, lets them finish, and compares each with an uninterrupted run, bit for bit.

    make campaign KILLS=1000 JOBS=2 SEED=0        stop it with Ctrl-C; the same command goes on
    make campaign CHAIN=0-17                      repeat chain 17 of seed 0, with its files in build/campaign/one

A chain is one configuration that is killed about five times. ``plan`` draws chains and kills from a seed, ``start``
starts ranks, which the recorder of ``harness verify-resume`` kills, and waits for their end, ``chain`` runs one chain,
``verdict`` compares, and ``page`` writes benchmarks/results/campaign.md. Start at ``chain``.
"""
