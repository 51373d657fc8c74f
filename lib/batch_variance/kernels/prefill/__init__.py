"""Prefill attention that agrees with decode: each row gets the bits that a decode step of its length would give it.

So a prompt may be prefilled whole, in chunks of any size, or token by token, alone or with others, and nothing but the
time changes. ``prefill`` is the operation; what is right is ``PrefillInputs.as_decode`` under ``decode``'s reference.
"""

from dataclasses import dataclass

import numpy as np
import torch

from ...common import BadInput
from ...schedules import Rule, make_plan, own_length_rule
from ..decode import Tile, emulate
from ..decode.reference import LOG2E
from .inputs import PrefillInputs

RULE = "free-4"


def prefill(
    inputs: PrefillInputs, rule: str = RULE, block_size: int = 64, out: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Causal attention of every row. Returns out ``[tokens, heads, d_v]`` in q's dtype and LSE ``[tokens, heads]``
    float32, bit for bit those of `decode.attend` for `PrefillInputs.as_decode` under the same rule.

    The Triton kernel for CUDA tensors, the emulation elsewhere. rule: ``never-split``, or one that folds in place
    (``free-N``, ``free-most-N``); out: where to write, contiguous. Raises BadInput for another rule, an ``out`` of
    another shape, dtype or device, for widths that are no powers of two from 16, or more query heads to a key/value
    head than a tile has lanes.
    """
    checked(rule)
    if out is None:
        out = torch.empty(_out_shape(inputs), dtype=inputs.q.dtype, device=inputs.q.device)
    _check_out(inputs, out)
    if not len(inputs.q):
        return out, torch.empty(inputs.q.shape[:2], dtype=torch.float32, device=inputs.q.device)
    if inputs.q.device.type == "cuda":
        return launch(inputs, DeviceTiles.upload(inputs, rule, block_size), out)
    rows = inputs.as_decode()
    found, lse = emulate(rows, make_plan(rule, rows.lengths(block_size), 1, block_size))
    return out.copy_(found), lse


def default_tile(inputs: PrefillInputs) -> Tile:
    """Lanes that fill a tensor core's tile; float32, which has none, takes few."""
    if inputs.q.dtype == torch.float32:
        return Tile(heads=16, warps=4, stages=5)
    return Tile(heads=128, warps=8, stages=2) if inputs.values.shape[3] <= 128 else Tile(heads=64, warps=8, stages=2)


def tiles(inputs: PrefillInputs, rows: int) -> np.ndarray:
    """int32 ``[tiles, 4]``: first row, rows, request, length of the first row; the longest first, so that no long tile
    is left for the end."""
    found = [
        (first, min(rows, end - first), request, cached + first - start + 1)
        for request, (cached, start, end) in enumerate(zip(inputs.cached, inputs.starts, inputs.starts[1:]))
        for first in range(start, end, rows)
    ]
    return np.array(sorted(found, key=lambda tile: -tile[3]), dtype=np.int32)


@dataclass(frozen=True)
class DeviceTiles:
    """What a launch needs from the host, on the inputs' device, so that a captured launch needs nothing from it.

    work: `tiles`; chunks: blocks a piece of each row, int32 ``[tokens]``, read where chunk is -1; chunk: as the decode
    kernel's CHUNK; starts, cached: those of the inputs.
    """

    work: torch.Tensor
    chunks: torch.Tensor
    chunk: int
    block_size: int
    tile: Tile
    starts: tuple[int, ...]
    cached: tuple[int, ...]

    @classmethod
    def upload(
        cls, inputs: PrefillInputs, rule: str, block_size: int = 64, tile: Tile | None = None
    ) -> "DeviceTiles":
        """Raises BadInput for a rule or shapes that the kernel does not take."""
        named = checked(rule)
        tile, group = tile or default_tile(inputs), inputs.heads // inputs.kv_heads
        widths = (("d_qk", inputs.q.shape[2]), ("d_v", inputs.values.shape[3]), ("block_size", block_size))
        for name, width in widths:
            if width < 16 or width & (width - 1):
                raise BadInput(f"{name} is {width}: the kernel takes powers of two from 16.")
        if group > tile.heads:
            raise BadInput(f"{group} query heads share a key/value head: a tile has {tile.heads} lanes.")
        work = torch.from_numpy(tiles(inputs, tile.heads // group)).to(inputs.q.device)
        chunk = (named.chunk_blocks or -1) if named.folds else 0
        chunks = work
        if chunk < 0:
            blocks = -(-inputs.lengths() // block_size)
            chunks = torch.from_numpy(np.asarray(named.chunk(blocks), dtype=np.int32)).to(inputs.q.device)
        return cls(work, chunks, chunk, block_size, tile, inputs.starts, inputs.cached)


def launch(
    inputs: PrefillInputs, device_tiles: DeviceTiles, out: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """`prefill` with the Triton kernel. Raises BadInput for tensors that are not contiguous, and for tiles or an
    ``out`` made for other inputs."""
    from . import triton as kernels

    _check_out(inputs, out)
    if device_tiles.starts != inputs.starts or device_tiles.cached != inputs.cached:
        raise BadInput(
            f"the tiles are for rows {list(device_tiles.starts)} after {list(device_tiles.cached)} tokens, the inputs"
            f" have {list(inputs.starts)} after {list(inputs.cached)}: upload tiles for these inputs."
        )
    if not all(t.is_contiguous() for t in (inputs.q, inputs.keys, inputs.values, inputs.block_table, out)):
        raise BadInput("q, keys, values, block_table and out must be contiguous: call .contiguous() first.")
    tile = device_tiles.tile
    lse = torch.empty(inputs.q.shape[:2], dtype=torch.float32, device=inputs.q.device)
    kernels.prefill_kernel[(inputs.kv_heads, len(device_tiles.work))](
        inputs.q,
        inputs.keys,
        inputs.values,
        inputs.block_table,
        device_tiles.work,
        device_tiles.chunks,
        lse if inputs.sink is None else inputs.sink * LOG2E,
        out,
        lse,
        inputs.scale * LOG2E,
        inputs.block_table.stride(0),
        inputs.keys.shape[0] * inputs.keys.shape[1],
        HEADS=inputs.heads,
        KV_HEADS=inputs.kv_heads,
        GROUP=inputs.heads // inputs.kv_heads,
        PAGE=inputs.keys.shape[1],
        D_QK=inputs.q.shape[2],
        D_V=inputs.values.shape[3],
        BLOCK=device_tiles.block_size,
        LANES=tile.heads,
        ROWS=1 << (tile.heads * inputs.kv_heads // inputs.heads - 1).bit_length(),
        CHUNK=device_tiles.chunk,
        HAS_SINK=inputs.sink is not None,
        UPCAST=inputs.q.dtype == torch.float32,
        STAGES=tile.stages,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    return out, lse


def _out_shape(inputs: PrefillInputs) -> list[int]:
    return [*inputs.q.shape[:2], inputs.values.shape[3]]


def _check_out(inputs: PrefillInputs, out: torch.Tensor) -> None:
    wanted = _out_shape(inputs)
    if list(out.shape) != wanted or (out.dtype, out.device) != (inputs.q.dtype, inputs.q.device):
        raise BadInput(
            f"out has shape {list(out.shape)} and dtype {out.dtype} on {out.device}: give {wanted} of {inputs.q.dtype}"
            f" on {inputs.q.device}."
        )


def checked(rule: str) -> Rule:
    """The rule of that name. Raises BadInput for one that neither folds in place nor leaves rows whole."""
    named = own_length_rule(rule)
    if not named.folds and named.kind != "never-split":
        raise BadInput(f"rule {rule!r} does not fold in place: prefill takes never-split, free-N or free-most-N.")
    return named


__all__ = ["RULE", "DeviceTiles", "PrefillInputs", "default_tile", "launch", "prefill", "tiles"]
