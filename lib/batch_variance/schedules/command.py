"""``batch-variance schedule``: print how a batch of rows is cut, without a GPU."""

import json

import click

from .flashmla import BLOCK_SIZE, FIXED_OVERHEAD_BLOCKS, H200_SMS, flashmla_schedule
from .plan import BATCH_WIDE, make_plan


@click.command()
@click.argument("lengths", metavar="LENGTH...", nargs=-1, required=True, type=int)
@click.option("--num-sm-parts", default=H200_SMS, show_default=True, help="SM parts (programs) to fill.")
@click.option("--block-size", default=BLOCK_SIZE, show_default=True, help="Tokens in a block of the KV cache.")
@click.option("--overhead", default=FIXED_OVERHEAD_BLOCKS, show_default=True, help="Cost of starting a row, in blocks.")
@click.option(
    "--rule",
    default=BATCH_WIDE,
    show_default=True,
    help="flashmla, never-split, fixed-count-N, fixed-chunk-N, free-N, free-most-N, by-length-A-B.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of tables.")
def schedule(lengths, num_sm_parts, block_size, overhead, rule, as_json):
    """Show how rows of these LENGTHs (tokens in the KV cache) are split over SM parts in one decode step."""
    plan = make_plan(rule, list(lengths), num_sm_parts, block_size, overhead)
    found = flashmla_schedule(list(lengths), num_sm_parts, block_size, overhead) if rule == BATCH_WIDE else None
    pieces = [int(n) for n in plan.pieces]
    if as_json:
        answer = {
            "rule": rule,
            "lengths": list(lengths),
            "splits_per_row": pieces,
            "segments": plan.segments.tolist(),
            "program_starts": plan.program_starts.tolist(),
        }
        if found:
            answer |= {
                "payload_blocks": found.payload,
                "num_splits": found.num_splits,
                "parts": [p._asdict() for p in found.parts],
            }
        click.echo(json.dumps(answer))
        return
    if found:
        click.echo(
            f"Quota of one part: {found.payload} blocks of {block_size} tokens, {overhead} of them overhead a row."
        )
    click.echo(f"{'row':>5} {'tokens':>8} {'splits':>7}  block bounds")
    for row, length in enumerate(lengths):
        click.echo(f"{row:>5} {length:>8} {pieces[row]:>7}  {' '.join(map(str, plan.bounds_of(row)))}")
    click.echo(f"{'part':>5}  rows and blocks")
    for program in range(plan.programs):
        work = plan.segments[plan.program_starts[program] : plan.program_starts[program + 1]]
        if len(work):
            click.echo(f"{program:>5}  " + ", ".join(f"row {row} [{begin}, {end})" for row, begin, end, _ in work))
    busy = int((plan.program_starts[1:] > plan.program_starts[:-1]).sum())
    click.echo(f"{busy} of {plan.programs} parts work.")
