"""Apex's ``normalization``: layer norm and RMS norm, as modules. The functions are in ``fused_layer_norm``."""

from __future__ import annotations

from harness.apex.normalization.fused_layer_norm import (
    FusedLayerNorm,
    FusedRMSNorm,
    MixedFusedLayerNorm,
    MixedFusedRMSNorm,
)

__all__ = ["FusedLayerNorm", "FusedRMSNorm", "MixedFusedLayerNorm", "MixedFusedRMSNorm"]
