"""Annotation tables, shard rules, image decoding and the resumable loader. Knows ranks as numbers only."""
