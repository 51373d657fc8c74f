"""``batch-variance audit MODEL``: run a model alone and in batches, and say which operation brings the difference
in.
"""

import json
import warnings
from pathlib import Path

import click
import pandas as pd

from ..common import BadInput, environment, resolve_device
from ..common.data import check_writable, write_text
from ..engine.checkpoint import DEFAULT_MODEL, hf_folder
from .audit import SIZES, Audit, tokens
from .subjects import DTYPES, PROMPTS, causal_subject

UNCOMPARED_SHOWN = 8


def audit_report(
    model: str,
    batch: int,
    dtype: str,
    device: str,
    prompts: list[str],
    token_count: int,
    watched: int,
    decode_steps: int,
) -> dict:
    """Audit a causal language model; the result is what ``--json`` writes, frames as lists of records.

    Raises BadInput for a model that cannot be loaded or a batch without batchmates.
    """
    if batch < 2:
        raise BadInput(f"batch {batch} has no batchmates: give 2 or more.")
    if dtype not in ("auto", *DTYPES):
        raise BadInput(f"dtype {dtype!r} is none that an audit runs in: give auto or one of {', '.join(DTYPES)}.")
    where = resolve_device(device)
    kind = dtype if dtype != "auto" else ("bfloat16" if where.type == "cuda" else "float32")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # transformers' deprecations are no part of the answer
        subject = causal_subject(str(hf_folder(model)), batch, prompts, kind, str(where), decode_steps, token_count)
        found = Audit(subject, min(watched, batch))
        sizes = found.sizes()
        told = tokens(subject, token_count) if token_count else None
    axes = found.axes()
    rerun_varies = int(axes.set_index("axis").loc["rerun", "vary"])
    return {
        "model": model,
        "batch": batch,
        "dtype": kind,
        "device": where.type,
        "tier": "live-gpu" if where.type == "cuda" else "cpu-native",
        "rows_watched": len(found.watched),
        "columns": int(subject.ids.shape[1]),
        "decode_steps": decode_steps,
        "axes": _records(axes),
        "first_introducing": found.first(),
        "uncompared": _records(found.uncompared()),
        "operations": _records(found.groups()),
        "calls": _records(found.operations()),
        "batch_sizes": _records(sizes),
        "changes_at": _records(changes(sizes)),
        "tokens": _records(told) if told is not None else [],
        "controls": {
            "negative_control": rerun_varies == 0 and found.feed_unrepeatable == 0,
            "positive_control": found.flip_seen and found.rows_told_apart,
            "occurred": batch >= 2,
            "unmatched_operations": sum(found.unmatched.values()),
        },
        "provenance": environment(),
    }


def changes(sizes: pd.DataFrame) -> pd.DataFrame:
    """Per kind of operation: how many bit classes its rows fall into, and the batch sizes at which the class
    changes.
    """
    rows = []
    for (phase, module, op), part in sizes.groupby(["phase", "module", "op"], sort=False):
        part = part.sort_values("size")
        at = part["size"][part["bit_class"].ne(part["bit_class"].shift()).to_numpy()].tolist()[1:]
        rows.append(
            {
                "phase": phase,
                "module": module,
                "op": op,
                "classes": part["bit_class"].nunique(),
                "changes_at": ", ".join(map(str, at)),
            }
        )
    return pd.DataFrame(rows, columns=["phase", "module", "op", "classes", "changes_at"])


def _records(frame: pd.DataFrame) -> list[dict]:
    return json.loads(frame.to_json(orient="records"))


def summary(report: dict) -> str:
    """What the command prints: axes, the kinds of operation that vary, batch sizes, tokens, and the first introducing
    operation.
    """
    operations = pd.DataFrame(report["operations"])
    vary = operations[operations["solo"] > 0]
    columns = [
        "phase",
        "module",
        "op",
        "calls",
        "solo",
        "introduces",
        "propagates",
        "max_ulp_in",
        "max_ulp_out",
        "max_row_scaled_ulp_out",
    ]
    lines = [
        f"{report['model']}, {report['dtype']} on {report['device']}, {report['rows_watched']} rows of a batch of {report['batch']} against themselves alone ({report['tier']})",
        "",
        pd.DataFrame(report["axes"]).to_string(index=False),
        "",
        f"{len(vary)} of {len(operations)} kinds of operation give other bits than alone:",
        vary[columns].to_string(index=False) if len(vary) else "none",
    ]
    told = pd.DataFrame(report["tokens"])
    if len(told):
        changed = int((told["first_difference"] >= 0).sum())
        lines += [
            "",
            f"logits differ in {int(told['logits_differ'].sum())} of {len(told)} rows; greedy tokens differ in {changed} of {len(told)} ({told['tokens'][0]} tokens each)",
        ]
    sized = pd.DataFrame(report["changes_at"])
    sized = sized[sized["classes"] > 1]
    lines += [
        "",
        f"batch sizes ({', '.join(map(str, SIZES))}) at which an operation changes its bits:",
        sized.to_string(index=False) if len(sized) else "none",
    ]
    controls = report["controls"]
    if not (controls["negative_control"] and controls["positive_control"]):
        lines += [
            "",
            "inconclusive: "
            + ", ".join(
                name.replace("_", " ") + " failed"
                for name in ("negative_control", "positive_control")
                if not controls[name]
            ),
        ]
    first, uncompared = report["first_introducing"], pd.DataFrame(report["uncompared"])
    if len(uncompared):
        before = len(uncompared) if first is None else int((uncompared["index"] <= first["index"]).sum())
        lines += [
            "",
            f"{len(uncompared)} operations could not be compared, {before} of them before "
            + ("any that introduces a difference:" if first is None else "the one named below:"),
            uncompared.drop(columns="index").head(UNCOMPARED_SHOWN).to_string(index=False),
        ]
    lines += [
        "",
        "no operation that was compared introduces a difference"
        if first is None and len(uncompared)
        else "no operation introduces a difference"
        if first is None
        else f"first to introduce a difference: {first['op']} in {first['module']} ({first['phase']}), up to {first['max_ulp_introduced']:,} ULP",
    ]
    return "\n".join(lines)


def read_prompts(path: Path) -> list[str]:
    """A JSON list of strings. Raises BadInput when it is something else."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:  # not JSON, or no UTF-8
        raise BadInput(f"{path} is no readable JSON file ({error}): give a JSON list of strings.") from None
    if not isinstance(found, list) or not found or not all(isinstance(text, str) and text for text in found):
        raise BadInput(f"{path} is not a JSON list of non-empty strings.")
    return found


@click.command()
@click.argument("model", default=DEFAULT_MODEL)
@click.option("--batch", default=8, show_default=True, help="Rows in the batch.")
@click.option(
    "--dtype",
    default="auto",
    show_default=True,
    help="float32, bfloat16 or float16; auto is float32 on a CPU, bfloat16 on a GPU.",
)
@click.option("--device", default="auto", show_default=True, help="auto, cpu or cuda.")
@click.option("--prompts", type=click.Path(path_type=Path), help="JSON list of prompts in place of ours.")
@click.option(
    "--tokens", "token_count", default=16, show_default=True, help="Greedy tokens to compare at the end; 0 for none."
)
@click.option("--rows", "watched", default=2, show_default=True, help="Rows to follow through every operation.")
@click.option("--decode-steps", default=1, show_default=True, help="Decode steps to audit after the prefill.")
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Write everything found to this file.")
def audit(model, batch, dtype, device, prompts, token_count, watched, decode_steps, json_path):
    """Find the operations of a model that depend on the batch.

    MODEL is the default model's name, a transformers folder, or a hub id.
    """
    for name, value, least in (
        ("--tokens", token_count, 0),
        ("--rows", watched, 1),
        ("--decode-steps", decode_steps, 0),
    ):
        if value < least:
            raise BadInput(f"{name} {value}: give {least} or more.")
    texts = read_prompts(prompts) if prompts else list(PROMPTS)
    if json_path:
        check_writable(json_path)
    report = audit_report(model, batch, dtype, device, texts, token_count, watched, decode_steps)
    click.echo(summary(report))
    if json_path:
        write_text(json_path, json.dumps(report, indent=1))
