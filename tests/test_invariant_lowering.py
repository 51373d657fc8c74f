"""What Triton makes of the invariant kernels' matmuls for an H100 or H200, compiled here without one: the tensor-core
instruction and, for the warp's instruction, whether it adds neighbours. That and the order of the loop over k is the
class by construction; the bits themselves are tested on the GPU."""

import re
from collections import Counter

import pytest

from batch_variance.common import BadInput
from batch_variance.kernels.gemm import invariant as gemm
from batch_variance.kernels.gemm.invariant import Config
from batch_variance.kernels.nvfp4 import bench as nvfp4_bench
from batch_variance.kernels.nvfp4 import invariant as nvfp4

pytest.importorskip("triton")
if not pytest.importorskip("triton.backends").backends.get("nvidia"):
    pytest.skip("this Triton has no NVIDIA backend", allow_module_level=True)

POINTERS = dict(x="*bf16", w="*bf16", bias="*bf16", codes="*u8", scales="*fp8e4nv", tensor_scale="*fp32")
POINTERS |= dict(arrived="*i32", parts="*fp32", parked="*fp32")
NUMBERS = dict(M="i32", N="i32", K="i32", segment="i32", segments="i32")


def lowered(kernels, config: Config, result: str, **marks) -> tuple[str, set[str]]:
    """The instruction ("wgmma" or "mma") and the operand layouts' kWidth of one configuration."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    function = kernels.in_turn if config.form == "in-turn" else kernels.parallel
    types = {**POINTERS, **NUMBERS, "y": result}
    values = dict(BLOCK_M=config.block_m, BLOCK_N=config.block_n, BLOCK_K=config.block_k, EVEN=True, TMA=False)
    values |= dict(BIAS=False, SPLIT=True, SWAP=config.swap, SEGMENTS=2, GROUP=8, HOLD=config.hold) | marks
    values = {name: value for name, value in values.items() if name in function.arg_names}
    signature = {name: "constexpr" if name in values else types[name] for name in function.arg_names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(function.arg_names) if name not in values}
    source = ASTSource(function, signature, constexprs=values, attrs=aligned)
    options = dict(num_warps=config.warps, num_stages=config.stages)
    code = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm
    kinds = set(re.findall(r"wgmma(?=\.mma_async)|mma(?=\.sync\.aligned\.m16n8k16)", code["ptx"]))
    assert len(kinds) == 1, f"{config}: {kinds}"
    return kinds.pop(), set(re.findall(r"kWidth = (\d+)", code["ttgir"]))


def nvfp4_lowered(config: Config):
    import triton.language as tl

    from batch_variance.kernels.nvfp4 import invariant_triton as kernels

    return lowered(kernels, config, "*fp32", OPERAND=tl.bfloat16)


def gemm_lowered(config: Config):
    from batch_variance.kernels.gemm import invariant_triton as kernels

    return lowered(kernels, config, "*bf16")


def table_of(benchmark: str) -> set[Config]:
    return {config for _, rows in gemm.tuned(benchmark).values() for _, config in rows}


@pytest.mark.parametrize("config", sorted({c for _, c in nvfp4.DEFAULTS} | table_of("nvfp4"), key=str), ids=str)
def test_nvfp4_chooses_the_warp_group_instruction_at_every_row_count(config):
    kind, widths = nvfp4_lowered(config)
    assert nvfp4.in_class(config) and kind == "wgmma" and widths <= {"2"}


def test_nvfp4_refuses_what_would_add_products_from_far_apart():
    import torch

    from batch_variance.numerics import quantize

    config = Config.parse("parallel 16x32x128 w4 s4")
    assert nvfp4_lowered(config) == ("mma", {"8"})
    assert not nvfp4.in_class(config)
    with pytest.raises(BadInput, match="another order"):
        nvfp4.matmul(torch.zeros(3, 64), quantize(torch.zeros(16, 64)), config, 1)


@pytest.mark.parametrize("config", sorted({c for _, c in gemm.DEFAULTS} | table_of("gemm"), key=str), ids=str)
def test_the_gemm_adds_neighbours_at_every_row_count(config):
    kind, widths = gemm_lowered(config)
    assert kind == "wgmma" or widths == {"2"}


def test_the_gemms_small_tiles_add_neighbours():
    assert gemm_lowered(Config.parse("parallel 16x32x64 w4 s3")) == ("mma", {"2"})


def test_the_nvfp4_tuner_tries_only_the_class():
    names = {name for names in nvfp4_bench.CANDIDATES.values() for name in names}
    assert [name for name in names if not nvfp4.in_class(Config.parse(name))] == []


def decode_code(heads: int, warps: int) -> Counter:
    """Counts of the instructions of the decode kernel for grouped queries in a tile."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from batch_variance.kernels.decode import triton as kernels

    function = kernels.decode_kernel
    values = dict(HEADS=64, KV_HEADS=8, GROUP=8, PAGE=64, PAGE2=64, D_QK=128, D_V=128, D_MAIN=128, TAIL=0, BLOCK=64)
    values |= dict(BLOCK_H=heads, FOLDS=True, SPREAD=False, DIRECT=True, LATENT=False, SPARSE=False, SECOND=False, HAS_SINK=False, UPCAST=False)
    values |= dict(STAGES=3)
    halves = {"q_ptr", "keys_ptr", "values_ptr", "keys2_ptr", "values2_ptr", "out_ptr"}
    floats = {"sink_ptr", "lse_ptr", "part_acc_ptr", "part_ml_ptr"}

    def kind(name):
        if name in values or name == "scale_log2":
            return "constexpr" if name in values else "fp32"
        return "*bf16" if name in halves else "*fp32" if name in floats else "*i32" if name.endswith("_ptr") else "i32"

    names = function.arg_names
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if name.endswith("_ptr")}
    source = ASTSource(function, {name: kind(name) for name in names}, constexprs=values, attrs=aligned)
    ptx = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=dict(num_warps=warps, num_stages=3)).asm["ptx"]
    return Counter(re.findall(r"^\s+([a-z][\w.:]*)\s", ptx, re.M))


def test_every_tile_of_decode_is_made_of_the_same_arithmetic():
    """The order of its sums is fixed in the kernel; here, that no tile rounds by other instructions."""
    tiles = [decode_code(heads, warps) for heads, warps in ((16, 4), (16, 1), (64, 4), (128, 8))]
    kinds = [{name for name in code if re.search(r"\.(f32|bf16x2)$", name) and not re.match(r"mov|st|ld|shfl|mma|wgmma", name)} for code in tiles]
    assert {"fma.rn.f32", "add.f32", "mul.f32", "ex2.approx.ftz.f32"} <= kinds[0], kinds[0]
    assert all(kind == kinds[0] for kind in kinds), kinds
    assert any(name.startswith("mma") for name in tiles[0]) and any(name.startswith("wgmma.mma") for name in tiles[2])
