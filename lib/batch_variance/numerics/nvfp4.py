"""NVFP4: e2m1 codes, one e4m3 scale for 16 values along K, one float32 scale for the tensor.

value = e2m1 code x block scale x tensor scale. Two codes share a byte, the even index in the low nibble.
Format: NVIDIA's description of NVFP4; scale choice: block maximum over 6, tensor scale so that the largest block
scale is 448, as in NVIDIA's Model Optimizer.
"""

from dataclasses import dataclass

import torch

BLOCK = 16
E2M1_MAX = 6.0
E4M3_MAX = 448.0
E4M3_SMALLEST = 2.0**-9

# Magnitudes of codes 0 ... 7; codes 8 ... 15 are their negatives, 8 being -0.
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# Halfway points between neighbours; a tie goes to the even code.
_MIDPOINTS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)


def encode_e2m1(x: torch.Tensor) -> torch.Tensor:
    """Nearest e2m1 code, ties to the even code, magnitudes over 6 (infinities too) saturating. uint8 0 ... 15.

    Raises ValueError on NaN, for which e2m1 has no code.
    """
    if x.isnan().any():
        raise ValueError(f"{int(x.isnan().sum())} values are NaN: e2m1 has no code for NaN, so give numbers.")
    magnitude = x.abs().to(torch.float64)
    code = torch.zeros(x.shape, dtype=torch.uint8, device=x.device)
    for index, middle in enumerate(_MIDPOINTS):
        beyond = magnitude >= middle if index % 2 else magnitude > middle
        code += beyond.to(torch.uint8)
    return code | (torch.signbit(x).to(torch.uint8) << 3)


def decode_e2m1(code: torch.Tensor) -> torch.Tensor:
    """float32 values of uint8 codes 0 ... 15, the sign of zero kept."""
    values = torch.tensor(E2M1_VALUES + tuple(-v for v in E2M1_VALUES), dtype=torch.float32, device=code.device)
    return values[code.to(torch.int64)]


def pack(code: torch.Tensor) -> torch.Tensor:
    """[..., K] codes, K even, to [..., K/2] bytes, the even index in the low nibble."""
    return code[..., 0::2] | (code[..., 1::2] << 4)


def unpack(packed: torch.Tensor) -> torch.Tensor:
    """[..., K/2] bytes to [..., K] codes: the inverse of pack."""
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)


@dataclass(frozen=True)
class NVFP4Tensor:
    """A quantized weight of N rows and K columns.

    codes: uint8 [N, K/2]; block_scale: float8_e4m3fn [N, K/16]; tensor_scale: float32 scalar tensor.
    """

    codes: torch.Tensor
    block_scale: torch.Tensor
    tensor_scale: torch.Tensor

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], self.codes.shape[1] * 2

    def unscaled(self) -> torch.Tensor:
        """float32 [N, K]: code x block scale. At most 6 significant bits, so exact in float32 and in bfloat16."""
        scale = self.block_scale.to(torch.float32).repeat_interleave(BLOCK, dim=1)
        return decode_e2m1(unpack(self.codes)) * scale

    def dequantize(self) -> torch.Tensor:
        """float32 [N, K]: code x block scale x tensor scale, rounded once, at the product with the tensor scale."""
        return self.unscaled() * self.tensor_scale

    def to(self, device: torch.device) -> "NVFP4Tensor":
        return NVFP4Tensor(self.codes.to(device), self.block_scale.to(device), self.tensor_scale.to(device))

    def rows(self, index: slice | torch.Tensor) -> "NVFP4Tensor":
        """The same tensor scale over some of the N rows."""
        return NVFP4Tensor(self.codes[index], self.block_scale[index], self.tensor_scale)


def quantize(weight: torch.Tensor, tensor_scale: float | None = None) -> NVFP4Tensor:
    """Quantize a [N, K] weight, K a multiple of 16.

    tensor_scale: positive; by default the largest magnitude over 6 x 448. A smaller one makes block scales overflow,
    which saturate at 448, and then codes at 6.
    Raises ValueError for another shape, a value that is not finite, or a tensor scale that is not positive.
    """
    if weight.dim() != 2 or weight.shape[1] % BLOCK:
        raise ValueError(f"the weight has shape {tuple(weight.shape)}: NVFP4 needs two dimensions, the second a multiple of {BLOCK}.")
    if not weight.isfinite().all():
        raise ValueError(f"{int((~weight.isfinite()).sum())} values of the weight are not finite: NVFP4 has no code for them.")
    blocks = weight.to(torch.float32).reshape(weight.shape[0], weight.shape[1] // BLOCK, BLOCK)
    largest = blocks.abs().amax(dim=-1) if blocks.numel() else blocks.new_zeros(blocks.shape[:2])
    if tensor_scale is None:
        peak = float(largest.max()) if largest.numel() else 0.0
        tensor_scale = peak / (E2M1_MAX * E4M3_MAX) or 1.0
    if not 0 < tensor_scale < float("inf"):
        raise ValueError(f"tensor_scale is {tensor_scale}: it must be positive and finite.")
    scale = torch.tensor(tensor_scale, dtype=torch.float32, device=weight.device)
    # torch turns an overflow into NaN, hence the clamp above; a block whose scale would round to 0 keeps the smallest one.
    block_scale = (largest / E2M1_MAX / scale).clamp(max=E4M3_MAX)
    block_scale = torch.where(largest > 0, block_scale.clamp(min=E4M3_SMALLEST), 0.0).to(torch.float8_e4m3fn)
    unit = (block_scale.to(torch.float32) * scale).unsqueeze(-1)
    codes = encode_e2m1(torch.where(unit > 0, blocks / unit, 0.0).reshape(weight.shape))
    return NVFP4Tensor(pack(codes), block_scale, scale)
