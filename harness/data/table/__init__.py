"""Annotation tables of any size: a CSV or Parquet file, converted once per node, then memory-mapped by every process.

Not here: images (data/images.py) or which rank reads which rows (data/shards.py).
Start at table.py; convert.py and csv_reader.py make the files it maps.
"""
