"""Distances between floating-point numbers, and the NVFP4 format."""

from .nvfp4 import BLOCK, E2M1_VALUES, NVFP4Tensor, decode_e2m1, encode_e2m1, pack, quantize, unpack
from .ulp import row_scaled_ulp, spacing, ulp_distance

__all__ = [
    "BLOCK", "E2M1_VALUES", "NVFP4Tensor", "decode_e2m1", "encode_e2m1", "pack", "quantize", "row_scaled_ulp",
    "spacing", "ulp_distance", "unpack",
]
