"""Libraries of models, one file each: PREFIX.py has the models ``PREFIX:NAME``; torchvision's need no prefix.

A file defines what ``Library`` in base.py declares. Not here: our own models (training/model/built_in).
"""
