"""That no tile leaves a trace in decode's bits, on a GPU: mma and wgmma, few lanes and many, folded in registers and in
memory. Skipped without CUDA."""

import pytest
import torch

from batch_variance.kernels.decode import Tile, Workspace, launch, plan_decode, random_inputs
from batch_variance.kernels.decode.launch import DevicePlan

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
LENGTHS = [1025, 0, 1, 63, 64, 65, 255, 256, 257, 2048, 511, 130]
WARPGROUPS = Tile(64, 8, 2, "warpgroups")
SHAPES = {
    "grouped": (
        dict(heads=64, kv_heads=8, d_qk=128, d_v=128),
        [Tile(16, 4, 5), Tile(16, 4, 1), Tile(16, 2, 3), Tile(16, 1, 3), Tile(32, 4, 3), Tile(64, 4, 3), Tile(128, 8, 3)],
    ),
    "one head a group": (
        dict(heads=4, kv_heads=4, d_qk=64, d_v=64, sink=True),
        [Tile(16, 4, 3), Tile(16, 1, 3), Tile(64, 4, 3), Tile(128, 4, 3)],
    ),
    "latent": (
        dict(heads=64, d_qk=576, d_v=512),
        [Tile(32, 8, 5), Tile(32, 8, 2), Tile(16, 8, 3), Tile(16, 4, 3), Tile(64, 8, 2), Tile(64, 8, 1), WARPGROUPS],
    ),
    "latent, sparse, one cache": (
        dict(heads=128, d_qk=576, d_v=512, sparse=True, invalid=0.1, sink=True),
        [Tile(32, 8, 5), Tile(64, 8, 2), WARPGROUPS],
    ),
    "latent, sparse": (
        dict(heads=128, d_qk=576, d_v=512, sparse=True, extra_lengths=[70, 3, 0] * 4, invalid=0.1),
        [Tile(32, 8, 5), Tile(16, 4, 3), Tile(64, 8, 2), WARPGROUPS],
    ),
}


def bits(inputs, rule, programs, tile):
    """Raw bits of out and LSE, from buffers full of NaN."""
    plan = tile.takes(plan_decode(inputs, rule, programs), inputs.d_v)
    out = torch.full((inputs.batch, inputs.heads, inputs.d_v), torch.nan, dtype=inputs.q.dtype, device="cuda")
    work = Workspace.for_slots(plan.num_slots, inputs.heads, inputs.d_v, "cuda")
    work.accumulators.fill_(torch.nan)
    work.states.fill_(torch.nan)
    out, lse = launch(inputs, DevicePlan.upload(plan, "cuda"), workspace=work, out=out, tile=tile)
    assert not out.isnan().any()
    return out.view(torch.int16), lse.view(torch.int32)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rule", ["free-4", "free-1", "free-most-8", "never-split", "fixed-count-3"])
def test_no_tile_leaves_a_trace(shape, rule):
    options, tiles = SHAPES[shape]
    inputs = random_inputs(LENGTHS, dtype=torch.bfloat16, device="cuda", **options)
    expected = bits(inputs, rule, 40, tiles[0])
    for tile in tiles:
        for programs in (1, 7, 40, 132):
            found = bits(inputs, rule, programs, tile)
            assert all(map(torch.equal, expected, found)), (tile, programs)
        alone = bits(inputs.row(9), rule, 16, tile)
        assert torch.equal(expected[0][9:10], alone[0]) and torch.equal(expected[1][9:10], alone[1]), tile


def test_another_tree_does():
    options, tiles = SHAPES["latent"]
    inputs = random_inputs(LENGTHS, dtype=torch.bfloat16, device="cuda", **options)
    assert not torch.equal(bits(inputs, "free-4", 40, WARPGROUPS)[0], bits(inputs, "free-8", 40, WARPGROUPS)[0])


def test_not_finite_keys_and_values_stay_in_their_row():
    options, tiles = SHAPES["latent"]
    inputs = random_inputs(LENGTHS, dtype=torch.bfloat16, device="cuda", **options)
    before = bits(inputs, "free-4", 40, tiles[0])[0]
    cache = inputs.caches[0]
    page = cache.block_table[0, 3].item()
    cache.keys[page, 5] = torch.inf
    others = slice(1, None)
    for tile in tiles:
        plan = plan_decode(inputs, "free-4", 40)
        after = launch(inputs, plan, tile=tile)[0]
        assert torch.equal(before[others], after.view(torch.int16)[others]), tile
        assert not after[0].isfinite().all()
