"""Annotation tables of any size: a CSV or Parquet file, converted once per cache and memory-mapped by every process.

Not here: images (data/images.py), or the rule by which ranks share the rows (data/shards.py).
Start at table.py; convert.py writes the files that it maps.
"""
