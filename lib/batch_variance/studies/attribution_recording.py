"""Serves the attribution study from a shell and writes its counts under ``data/recorded``, part by part.

    python -m batch_variance.studies.attribution_recording data/recorded --device cuda --ffn moe
    python -m batch_variance.studies.attribution_recording data/recorded --device cuda --parts planted amplifiers
    python -m batch_variance.studies.attribution_recording data/recorded --device cpu --ffn dense --off --tokens 4

The tables are rewritten after every cell, so what was served before an interruption is kept. ``--off`` serves all
mechanisms off only, at each concurrency. ``--count`` serves nothing and says how many engine steps it would take.
"""

import argparse
import sys
import time
from typing import Sequence

from ..common import BadInput, resolve_device
from ..engine import DEFAULT_MODEL, MECHANISMS, Settings
from . import attribution_measuring as measuring
from .attribution_design import DESIGNS, Design
from .attribution_measuring import AMPLIFIERS, PARTS, Plan, applicable
from .cells import Subject
from .texts import many_prompts

OFF_CONCURRENCIES = (1, 2, 4, 8, 16, 32, 64)


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 0, or 2 for input that cannot be used, said in one sentence."""
    try:
        return _run(_parser().parse_args(arguments))
    except BadInput as error:
        print(f"attribution_recording: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m batch_variance.studies.attribution_recording", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("folder", help="where the tables go, or are")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--ffn", choices=("moe", "dense"), default="moe")
    parser.add_argument("--experts", type=int, default=16)
    parser.add_argument("--top-k", type=int, default=12)
    parser.add_argument("--threshold", type=int, default=32)
    parser.add_argument("--mechanisms", nargs="+", default=list(MECHANISMS))
    parser.add_argument("--design", choices=DESIGNS, default="orders")
    parser.add_argument("--orders", type=int, default=2)
    parser.add_argument("--storage", default="float32")
    parser.add_argument("--logits", default="float32")
    parser.add_argument("--activations", default="float16")
    parser.add_argument("--concurrency", type=int, default=32)
    parser.add_argument("--concurrencies", type=int, nargs="+", default=None)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--planted", type=float, nargs="+", default=[0.01, 0.03, 0.1, 0.3, 1.0])
    parser.add_argument("--carrier", default="split_k")
    parser.add_argument("--parts", nargs="+", default=list(PARTS))
    parser.add_argument("--processes", type=int, default=0)
    parser.add_argument("--off", action="store_true", help="all mechanisms off only, at each concurrency")
    parser.add_argument("--count", action="store_true", help="say how many engine steps it would take, and stop")
    return parser


def _run(given: argparse.Namespace) -> int:
    device = resolve_device(given.device).type
    plan = _plan(given)
    if given.count:
        print(steps_sentence(plan, given.prompts))
        return 0
    subject = Subject.of(
        given.model, given.ffn, given.experts, given.top_k, "clustered", device, many_prompts(given.prompts)
    )
    kind = "dense" if given.ffn == "dense" else f"derived: FFN split into {given.experts} experts, top {given.top_k}"
    begun = time.monotonic()

    def keep(measured) -> None:
        measuring.save(subject, f"NVFP4 FFN, {kind}", plan, measured, given.folder)

    measured = measuring.measure(subject, plan, given.processes, keep)
    keep(measured)
    changed, served = int(measured.prompts.changed.sum()), int(measured.prompts.requests.sum())
    print(
        f"{served:,} requests (a cell counts in each of its parts), {changed:,} changed,"
        f" {int(measured.steps.steps.sum()):,} steps, {time.monotonic() - begun:.0f} s"
    )
    return 0


def _plan(given: argparse.Namespace) -> Plan:
    design = Design(
        applicable(given.mechanisms, given.ffn, given.activations),
        given.design,
        given.orders if given.design == "orders" else 0,
    )
    base = Settings(
        storage=given.storage, logits=given.logits, activations=given.activations, threshold=given.threshold
    )
    levels = tuple(given.concurrencies or (OFF_CONCURRENCIES if given.off else (1, 8, 32, 64)))
    return Plan(
        design,
        base,
        given.concurrency,
        levels,
        given.requests,
        given.tokens,
        tuple(given.seeds),
        tuple(AMPLIFIERS),
        given.carrier,
        tuple(given.planted),
        ("load",) if given.off else tuple(given.parts),
        given.prompts,
        given.off,
    )


def steps_sentence(plan: Plan, prompts: int) -> str:
    """About how many steps a plan takes: full batches of tokens, and one ramp up and down a shard."""
    cells = plan.cells()
    batch = sum(
        sum(load.requests * load.max_tokens / load.concurrency + load.max_tokens for _, load in cell.shards())
        for cell in cells
    )
    alone = len({(cell.alone, cell.tokens) for cell in cells}) * prompts * plan.tokens
    return (
        f"{len(cells)} cells, {sum(cell.requests for cell in cells):,} requests: about {batch:,.0f} steps in batches"
        f" and {alone:,} alone."
    )


if __name__ == "__main__":
    sys.exit(main())
