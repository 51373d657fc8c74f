"""Split-KV decode attention: paged caches, grouped queries or latent (MLA), any plan from ``schedules``.

``attend`` is the operation; ``reference`` says what is right; ``triton`` holds the GPU kernels.
"""

import torch

from ...common import BadInput
from ...schedules import BATCH_WIDE, Plan, make_plan
from .inputs import Cache, DecodeInputs, random_inputs
from .launch import WARPGROUPS, DevicePlan, Tile, Workspace, default_tile, launch, programs_for
from .reference import FOLDS, emulate, exact

# Dispatch policies as data: the name in recorded tables, and the rule that cuts rows.
POLICIES = {
    "default": BATCH_WIDE,
    "invariant-never-split": "never-split",
    "invariant-fixed-count-4": "fixed-count-4",
    "invariant-fixed-chunk-4": "fixed-chunk-4",
    "invariant-free": "free-4",
}


def plan_decode(inputs: DecodeInputs, rule: str, num_programs: int, block_size: int = 64) -> Plan:
    """The plan of a rule (``flashmla`` or an own-length rule) for these inputs. Copies the lengths to the host."""
    return make_plan(rule, inputs.lengths(block_size), num_programs, block_size)


def attend(
    inputs: DecodeInputs, plan: Plan | DevicePlan, fold: str = "left", **options
) -> tuple[torch.Tensor, torch.Tensor]:
    """Decode along a plan: the Triton kernels for CUDA tensors (``options`` go to ``launch``), the emulation elsewhere.

    Returns out ``[batch, heads, d_v]`` in q's dtype and LSE ``[batch, heads]`` float32. Raises BadInput as those do.
    """
    if inputs.q.device.type == "cuda":
        return launch(inputs, plan, fold, **options)
    if options:
        raise BadInput(f"{', '.join(options)} are options of the Triton kernels: the emulation on a CPU takes none.")
    return emulate(inputs, plan.plan if isinstance(plan, DevicePlan) else plan, fold)


__all__ = [
    "Cache",
    "DecodeInputs",
    "DevicePlan",
    "FOLDS",
    "POLICIES",
    "Tile",
    "WARPGROUPS",
    "Workspace",
    "attend",
    "default_tile",
    "emulate",
    "exact",
    "launch",
    "plan_decode",
    "programs_for",
    "random_inputs",
]
