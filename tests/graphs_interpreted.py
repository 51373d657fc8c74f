"""Run by test_engine_graphs.py in a process of its own, where Triton's interpreter is on: prints one JSON line of results.

The decode kernels along plans that are written, one after another, into arrays of the largest size, against the same
plans uploaded as they are.
"""

import json

import numpy as np
import torch

from batch_variance.engine.graphs import Buffers, plan_in, plan_shapes, write_plan
from batch_variance.kernels.decode import DevicePlan, Workspace, launch, random_inputs
from batch_variance.schedules import make_plan

LONGEST, PROGRAMS, BLOCK = 112, 5, 16
CALLS = ([100, 1, 33, 16], [1, 2, 3, 4], [17, 64, 96, 31])

results = []
for rule in ("flashmla", "never-split", "free-2", "fixed-chunk-1"):
    there = buffers = None
    for lengths in CALLS:
        inputs = random_inputs(lengths, 16, 1, 16, 16, page_size=16, dtype=torch.float16, seed=len(results))
        plan = make_plan(rule, lengths, PROGRAMS, BLOCK)
        if there is None:
            buffers = Buffers(plan_shapes(plan, LONGEST) | {"lengths": (np.int32, (4,))}, torch.device("cpu"))
            write_plan(buffers.host, plan)
            there = plan_in(buffers, plan, LONGEST)
        write_plan(buffers.host, plan)
        buffers.host["lengths"][:] = lengths

        def run(plan, slots):
            work = Workspace.for_slots(slots, 16, 16, "cpu")
            work.accumulators.fill_(torch.nan), work.states.fill_(torch.nan)
            out = torch.full((4, 16, 16), torch.nan, dtype=torch.float16)
            return launch(inputs, plan, workspace=work, out=out)

        kept, fresh = run(there, there.room), run(DevicePlan.upload(plan, "cpu"), plan.num_slots)
        results.append(
            {
                "rule": rule,
                "same": all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(kept, fresh)),
                "nan": int(kept[0].isnan().sum()),
                "padded": int((buffers.host["segments"][:, 0] == -1).sum()),
                "slots": plan.num_slots,
                "room": there.room,
            }
        )
print(json.dumps(results))
