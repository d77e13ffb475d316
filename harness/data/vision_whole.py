"""Imports torchvision, for a launcher whose ranks all need its transforms or models and are forked from it."""

from harness.data import vision

vision.module("torchvision.transforms.v2")
