"""Running the Triton decode kernels: a plan's arrays on the device, the buffer for partials, and the two launches."""

from dataclasses import dataclass

import numpy as np
import torch

from ...common import BadInput
from ...schedules import Plan, spread
from .inputs import DecodeInputs
from .reference import LOG2E, check_fold

KERNEL_FOLDS = ("left", "pairwise", "compensated")


@dataclass(frozen=True)
class Workspace:
    """Buffers of one decode call. accumulators: ``[slots, heads, d_v]`` float32; states: ``[slots, heads, 2]`` (m, l)
    float32."""

    accumulators: torch.Tensor
    states: torch.Tensor

    @classmethod
    def for_slots(cls, slots: int, heads: int, d_v: int, device) -> "Workspace":
        slots = max(slots, 1)
        return cls(
            torch.empty(slots, heads, d_v, dtype=torch.float32, device=device),
            torch.empty(slots, heads, 2, dtype=torch.float32, device=device),
        )


@dataclass(frozen=True)
class DevicePlan:
    """A plan whose arrays lie on the inputs' device, so that a captured launch needs nothing from the host. room: slots
    of the largest plan that may be written into the arrays before a captured launch is replayed."""

    plan: Plan
    segments: torch.Tensor
    program_starts: torch.Tensor
    slot_starts: torch.Tensor
    chunks: torch.Tensor
    room: int = 0

    @property
    def slots(self) -> int:
        return max(self.plan.num_slots, self.room)

    @property
    def most(self) -> int:
        """Partials of a row that has the most of them."""
        return self.room or int(np.diff(self.plan.slot_starts).max(initial=0))

    @classmethod
    def upload(cls, plan: Plan, device) -> "DevicePlan":
        arrays = (plan.segments, plan.program_starts, plan.slot_starts, plan.chunks)
        return cls(plan, *(torch.from_numpy(a).to(device) for a in arrays))


@dataclass(frozen=True)
class Tile:
    """Launch shape. heads: query heads a program holds at once (16 at least, a power of two); stages: depth of the load
    pipeline, where a page's address costs every second one; form: ``portable`` for the Triton kernel, or ``warpgroups``
    for the one of ``hopper``, of 64 heads and 8 warps, where ``fits_hopper`` says that it can (the Triton kernel
    elsewhere). No tile leaves a trace in the bits: choose as freely as an autotuner likes."""

    heads: int
    warps: int
    stages: int
    form: str = "portable"

    def takes(self, plan: Plan, d_v: int) -> Plan:
        """The plan as a launch in this tile needs it: where one accumulator fills so many of a thread's registers that
        there is no room for what is folded, every piece goes to the combine step."""
        return spread(plan) if self.heads * d_v > 64 * 32 * self.warps else plan


WARPGROUPS = Tile(heads=64, warps=8, stages=2, form="warpgroups")


def default_tile(inputs: DecodeInputs) -> Tile:
    """Tile by shape: a latent cache's wide accumulators need many warps, grouped queries few."""
    if fits_hopper(inputs, 64):
        return WARPGROUPS
    if inputs.latent and inputs.d_v >= 256:
        return Tile(heads=32, warps=8, stages=5)
    return Tile(heads=16, warps=4, stages=5)


def fits_hopper(inputs: DecodeInputs, block_size: int) -> bool:
    """Whether the inputs lie on a Hopper GPU and have the shape that ``hopper`` is written for: latent caches of one page
    size, of 512 + 64 numbers a token in 16 bits; query heads by the 64; blocks of 64 tokens."""
    device = inputs.q.device
    return (
        device.type == "cuda"
        and torch.cuda.get_device_capability(device)[0] == 9
        and inputs.latent
        and inputs.caches[0].keys.shape[1] == inputs.caches[-1].keys.shape[1]
        and (inputs.q.shape[2], inputs.d_v, block_size) == (576, 512, 64)
        and inputs.heads % 64 == 0
        and inputs.q.dtype != torch.float32
    )


def programs_for(inputs: DecodeInputs, sms: int, tile: Tile | None = None, per_sm: int | None = None) -> int:
    """Programs to plan for, so that programs times head tiles fill ``sms`` multiprocessors ``per_sm`` times."""
    tile = tile or default_tile(inputs)
    group = inputs.heads // inputs.kv_heads
    columns = inputs.kv_heads * -(-group // tile.heads)
    per_sm = per_sm or (1 if inputs.latent and inputs.d_v >= 256 else 2)
    return max(sms * per_sm // columns, 1)


def launch(
    inputs: DecodeInputs,
    plan: Plan | DevicePlan,
    fold: str = "left",
    workspace: Workspace | None = None,
    out: torch.Tensor | None = None,
    tile: Tile | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Decode along a plan with the Triton kernels. Returns out ``[batch, heads, d_v]`` and LSE ``[batch, heads]``
    float32.

    Accumulates in float32, out has q's dtype. fold: ``left``, ``pairwise`` or ``compensated``. The plan must have been
    made for the inputs' lengths; one on the device must be as ``tile.takes`` gives it. Raises BadInput for a plan of
    another batch size or that the tile cannot take, a buffer with fewer slots than the plan has partials, widths that
    are no powers of two of at least 16, an unknown fold, or one that the rule does not allow.
    """
    from . import triton as kernels

    tile = tile or default_tile(inputs)
    if isinstance(plan, Plan):
        plan = DevicePlan.upload(tile.takes(plan, inputs.d_v), inputs.q.device)
    main = inputs.d_v if inputs.latent else inputs.q.shape[2]
    tail = inputs.q.shape[2] - main
    _check(inputs, plan, fold, workspace, out, (main, tail, inputs.d_v), tile)
    if workspace is None:
        workspace = Workspace.for_slots(plan.slots, inputs.heads, inputs.d_v, inputs.q.device)
    if out is None:
        out = torch.empty(inputs.batch, inputs.heads, inputs.d_v, dtype=inputs.q.dtype, device=inputs.q.device)
    lse = torch.empty(inputs.batch, inputs.heads, dtype=torch.float32, device=inputs.q.device)
    first, second = inputs.caches[0], inputs.caches[-1]
    group = inputs.heads // inputs.kv_heads
    sink = None if inputs.sink is None else inputs.sink * LOG2E

    def pointers(cache):
        return cache.keys, cache.keys if cache.values is None else cache.values, cache.table, cache.lengths

    if tile.form == "warpgroups" and fits_hopper(inputs, plan.plan.block_size):
        from . import hopper

        hopper.decode(inputs, plan, workspace, lse if sink is None else sink, out, lse)
    else:
        grid = (inputs.kv_heads * -(-group // tile.heads), plan.plan.programs)
        kernels.decode_kernel[grid](
            inputs.q,
            *pointers(first),
            *pointers(second),
            lse if sink is None else sink,
            plan.segments,
            plan.program_starts,
            plan.chunks,
            out,
            lse,
            workspace.accumulators,
            workspace.states,
            inputs.scale * LOG2E,
            first.table.stride(0),
            second.table.stride(0),
            first.places,
            second.places,
            HEADS=inputs.heads,
            KV_HEADS=inputs.kv_heads,
            GROUP=group,
            PAGE=first.keys.shape[1],
            PAGE2=second.keys.shape[1],
            D_QK=inputs.q.shape[2],
            D_V=inputs.d_v,
            D_MAIN=main,
            TAIL=tail,
            BLOCK=plan.plan.block_size,
            BLOCK_H=tile.heads,
            FOLDS=plan.plan.folds,
            LATENT=inputs.latent,
            SPARSE=inputs.sparse,
            SECOND=len(inputs.caches) == 2,
            HAS_SINK=sink is not None,
            UPCAST=inputs.q.dtype == torch.float32,
            SPREAD=plan.plan.spread,
            DIRECT=inputs.q.device.type == "cuda",
            STAGES=tile.stages,
            num_warps=tile.warps,
            num_stages=tile.stages,
        )
    if plan.slots:
        kernels.combine_kernel[(inputs.batch, inputs.heads)](
            plan.slot_starts,
            workspace.accumulators,
            workspace.states,
            lse if sink is None else sink,
            out,
            lse,
            HEADS=inputs.heads,
            D_V=inputs.d_v,
            HAS_SINK=sink is not None,
            FOLD=fold,
            AHEAD=4 if plan.most <= 5 else 32,
            num_warps=4 if inputs.d_v >= 256 else 1,
        )
    return out, lse


def _check(inputs, there: DevicePlan, fold: str, workspace, out, widths, tile: Tile) -> None:
    plan = there.plan
    check_fold(fold, KERNEL_FOLDS, plan)
    if plan.batch != inputs.batch:
        raise BadInput(f"the plan is for {plan.batch} rows, the inputs have {inputs.batch}: plan this batch.")
    main, tail, d_v = widths
    for name, width in (
        ("d_qk", main),
        ("d_qk - d_v", tail),
        ("d_v", d_v),
        ("block_size", plan.block_size),
        ("tile.heads", tile.heads),
    ):
        if width and (width < 16 or width & (width - 1)):
            raise BadInput(f"{name} is {width}: the kernels take powers of two from 16.")
    if tile.form not in ("portable", "warpgroups"):
        raise BadInput(f"tile.form is {tile.form!r}: give portable or warpgroups.")
    if tile.form == "warpgroups" and (tile.heads, tile.warps) != (64, 8):
        raise BadInput(f"a tile of warpgroups has {tile.heads} heads and {tile.warps} warps: give 64 and 8.")
    if tile.takes(plan, d_v) is not plan:
        raise BadInput(
            f"a tile of {tile.heads} heads in {tile.warps} warps cannot fold {d_v} columns in place: upload the plan as "
            f"tile.takes(plan, {d_v}) gives it."
        )
    if workspace is not None:
        slots = min(workspace.accumulators.shape[0], workspace.states.shape[0])
        if slots < there.slots or list(workspace.accumulators.shape[1:]) != [inputs.heads, d_v]:
            raise BadInput(
                f"the split buffer has shape {list(workspace.accumulators.shape)}: this plan needs "
                f"[{there.slots}, {inputs.heads}, {d_v}]."
            )
    if out is not None and (
        list(out.shape) != [inputs.batch, inputs.heads, d_v] or out.dtype != inputs.q.dtype or not out.is_contiguous()
    ):
        raise BadInput(
            f"out has shape {list(out.shape)} and dtype {out.dtype}: give a contiguous "
            f"[{inputs.batch}, {inputs.heads}, {d_v}] of {inputs.q.dtype}."
        )
    tensors = [inputs.q] + [t for c in inputs.caches for t in (c.keys, c.values, c.table, c.lengths) if t is not None]
    if not all(t.is_contiguous() for t in tensors):
        raise BadInput(
            "q, keys, values, tables and lengths must be contiguous for the kernels: call .contiguous() first."
        )
