"""Data from a CSV to batches: annotation tables, shard rules, image decoding, the resumable loader, datasets.

Not here: what a batch means (harness/tasks), or communication (harness/distributed); a rank is only a number here.
Start at rank_data.py, then shards.py (which rank reads which rows), loader.py and table/table.py.
"""
