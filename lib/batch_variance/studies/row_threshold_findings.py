"""What notebook 01's tables say: verdicts with their controls, and sentences with the numbers in them."""

import pandas as pd

from ..common import Rate
from .row_threshold import RECORDED_TABLES, Setup, recorded, total_variants
from .sources import cite, given, named


def describe(setup: Setup) -> str:
    """Which model runs on what, in a sentence or two."""
    p, lengths = setup.p, sorted(len(prompt) for prompt in setup.prompts)
    where = "real Triton kernels on this GPU" if setup.tier == "live-gpu" else "GPU arithmetic modelled on this CPU"
    many = cite(f"{len(lengths)} prompts of {lengths[0]} to {lengths[-1]} tokens", prompt_lengths(setup))
    return (f"Model: `{p.model}`, {setup.weights.label}. {many}, "
            f"{given(p, 'tokens')} tokens generated each, threshold {given(p, 'threshold')} rows. Evidence tier: {setup.tier} ({where}).")


def prompt_lengths(setup: Setup) -> pd.DataFrame:
    """prompt (its number) and its tokens."""
    lengths = list(map(len, setup.prompts))
    return named(pd.DataFrame({"prompt": range(len(lengths)), "tokens": lengths}), "prompts")


# --- Plain torch on the CPU ---


def _condition(conditions: pd.DataFrame, dtype: str, onednn: str) -> pd.Series:
    return conditions[(conditions.dtype == dtype) & (conditions.oneDNN == onednn)].iloc[0]


def native_sentence(conditions: pd.DataFrame) -> str:
    single, half, off = (_condition(conditions, *key) for key in (("float32", "on"), ("bfloat16", "on"), ("bfloat16", "off")))
    at = lambda text, row: cite(text, conditions, dtype=row["dtype"], oneDNN=row.oneDNN)  # noqa: E731
    share = lambda row: at(f"{row['margins moved'] / max(row['tokens compared'], 1):.0%}", row)  # noqa: E731
    texts = lambda row: at(f"{row['texts changed']} of {row.texts}", row)  # noqa: E731
    return (f"Served together instead of alone, {texts(half)} bfloat16 texts and "
            f"{texts(single)} float32 texts changed, while {share(half)} and {share(single)} of the "
            f"tokens' margins moved by at least a bit. With oneDNN off, {texts(off)} bfloat16 texts changed "
            f"and {share(off)} of the margins moved. {at(half['exact ties'], half)} of the bfloat16 tokens were exact ties of two logits.")


def native_verdict(conditions: pd.DataFrame) -> dict:
    """The intervention on oneDNN. Its positive control is that bfloat16 texts do change with oneDNN on."""
    on, off = _condition(conditions, "bfloat16", "on"), _condition(conditions, "bfloat16", "off")
    rate = Rate(int(off["texts changed"]), int(off.texts))
    return {
        "holds": bool(rate.events == 0 and off["margins moved"] == 0), "value": rate.events, "expected": 0, "n": rate.trials,
        "interval": rate.interval, "negative_control": bool(conditions["re-run same"].all()),
        "positive_control": bool(on["texts changed"] > 0), "occurred": bool(on["margins moved"] > 0),
    }


# --- Serving ---


def crossing_sentence(crossed: pd.DataFrame) -> str:
    said = []
    for row in crossed[crossed.policy == "default"].itertuples(index=False):
        over, prefill, alone = row[3], row[5], row[4]
        at = lambda text: cite(text, crossed, policy="default", concurrency=row.concurrency)  # noqa: B023, E731
        how = f"{at(f'{prefill:,}')} through prefill and {at(f'{alone:,}')} by decode rows alone" if over else "none"
        many = at(f"{over:,} of {row.FFNs:,} FFNs ({over / row.FFNs:.1%})")
        said.append(f"at concurrency {at(row.concurrency)}, {many} crossed the threshold: {how}")
    return f"Under the default policy, {'; '.join(said)}."


def variants_sentence(variants: pd.DataFrame) -> str:
    said = []
    for name in dict.fromkeys(variants.policy):
        prompts, differ, requests = total_variants(variants, name)
        at = lambda text: cite(text, variants, policy=name)  # noqa: B023, E731
        said.append(f"{name}: {at(Rate(differ, requests))} requests differ from the prompt alone, {at(prompts)} times a prompt had more than one output")
    return f"Above concurrency {cite(1, variants, concurrency=1)}, {'; '.join(said)}. Intervals are exact (Clopper-Pearson, 95%)."


def policy_verdicts(variants: pd.DataFrame, pairs: pd.DataFrame, crossed: pd.DataFrame, solo_texts_differ: bool,
                    invariant: bool, fault_caught: bool, prefix: str = "01.paths") -> list[dict]:
    """One verdict a forced path, one for the default dispatch, one for prompts served alone twice.

    solo_texts_differ: some prompt's text alone differs between the two forced paths, so a change of path can show in text.
    invariant, fault_caught: the base operations' control and its planted fault.
    """
    over = crossed[crossed.concurrency > 1].groupby("policy", sort=False)[["over the threshold", "FFNs"]].sum()
    prompts, differ, requests = total_variants(variants, "default")
    found = []
    for name in [n for n in over.index if n.startswith("force-")]:
        _, changed, count = total_variants(variants, name)
        rate = Rate(changed, count)
        found.append({
            "id": f"{prefix}-{name}", "claim": f"{name}: no request's text depends on its batch, at any concurrency",
            "holds": changed == 0, "value": changed, "expected": 0, "n": count, "interval": rate.interval,
            "negative_control": invariant, "positive_control": bool(fault_caught and differ > 0),
            "occurred": bool(over.loc[name, "over the threshold"] > 0),
        })
    forced = {n: total_variants(variants, n)[1] for n in over.index if n.startswith("force-")}
    crossed_both = 0 < over.loc["default", "over the threshold"] < over.loc["default", "FFNs"]
    found.append({
        "id": f"{prefix}-default", "claim": "default dispatch: some request's text depends on its batch",
        "holds": differ > 0, "value": differ, "expected": "> 0", "n": requests, "interval": Rate(differ, requests).interval,
        "negative_control": bool(forced) and max(forced.values()) == 0, "positive_control": bool(fault_caught and (solo_texts_differ or differ > 0)),
        "occurred": bool(crossed_both),
    })
    alone = pairs[pairs.concurrency == 1]
    repeated = Rate(int(alone["differ between A and B"].sum()), int(alone.requests.sum()))
    busy = pairs[(pairs.concurrency > 1) & (pairs.policy == "default")]["differ between A and B"].sum()
    rows_alone = variants[variants.concurrency == 1]["co-resident rows"].max()
    found.append({
        "id": f"{prefix}-alone-twice", "claim": "A prompt served alone twice gives the same text, under every policy",
        "holds": repeated.events == 0, "value": repeated.events, "expected": 0, "n": repeated.trials, "interval": repeated.interval,
        "negative_control": invariant, "positive_control": bool(busy > 0),
        "occurred": bool(rows_alone < variants[variants.concurrency > 1]["co-resident rows"].min()),
    })
    return found


def solo_texts_differ(requests: pd.DataFrame) -> bool:
    """Whether some prompt's text alone differs between policies."""
    alone = requests[(requests.concurrency == 1) & (requests.run == "A")]
    return bool((alone.groupby("prompt").tokens.nunique() > 1).any())


# --- The two paths ---


def step_summary(parts: pd.DataFrame) -> pd.DataFrame:
    """`decompose` over its layers: medians, and the largest row-scaled ULP."""
    found = parts.groupby("step", sort=False).agg(**{
        "other bits": ("other_bits", "median"), "ULP, median": ("median_ulp", "median"),
        "row-scaled ULP, median": ("median_row_scaled_ulp", "median"), "row-scaled ULP, largest": ("largest_row_scaled_ulp", "max"),
        "relative difference": ("relative_difference", "median"), "relative error (float64)": ("relative_error", "median"),
    }).reset_index()
    for name in ("relative difference", "relative error (float64)"):
        found[name] = found[name].map("{:.2e}".format)
    return named(found, "steps")


def _difference(parts: pd.DataFrame, step: str) -> float:
    return float(parts[parts.step == step].relative_difference.median())


def decomposition_sentence(parts: pd.DataFrame) -> str:
    whole = _difference(parts, "GEMM (all three)")
    share = {name: _difference(parts, f"only {name}") / whole for name in ("activation rounding", "weight rounding", "order of additions")}
    error = {step: float(parts[parts.step == step].relative_error.median()) for step in ("GEMV, run again", "GEMM (all three)")}
    steps = step_summary(parts)
    at = lambda text, step: cite(text, steps, step=step)  # noqa: E731
    make = lambda name, form: at(format(share[name], form), f"only {name}")  # noqa: E731
    return (f"The two paths differ by {at(f'{whole:.1e}', 'GEMM (all three)')} of the output's size. Alone, activation rounding makes {make('activation rounding', '.0%')} of "
            f"that, weight rounding {make('weight rounding', '.0%')} and the order of additions {make('order of additions', '.2%')} (the "
            f"first two add as independent errors do, in squares). Against float64 the GEMV is off by "
            f"{at(format(error['GEMV, run again'], '.0e'), 'GEMV, run again')} and "
            f"the GEMM by {at(format(error['GEMM (all three)'], '.0e'), 'GEMM (all three)')}.")


def agreement_summary(agreement: pd.DataFrame) -> pd.DataFrame:
    found = agreement.groupby("policy", sort=False).agg(**{
        "values": ("values", "sum"), "other bits": ("other_bits", "median"), "row-scaled ULP, median": ("median_row_scaled_ulp", "median"),
        "row-scaled ULP, largest": ("largest_row_scaled_ulp", "max"), "relative difference": ("relative_difference", "median"),
    }).reset_index()
    return named(found.assign(**{"relative difference": found["relative difference"].map("{:.2e}".format)}), "agreement")


def _apart(agreement: pd.DataFrame, name: str, column: str = "relative_difference") -> float:
    return float(agreement[agreement.policy == name][column].median())


def agreement_verdict(agreement: pd.DataFrame, parts: pd.DataFrame, prefix: str = "01.paths") -> dict:
    """That rounding the activations alone leaves the paths apart; a rounding that changed nothing would prove nothing."""
    other = _apart(agreement, "round-activations", "other_bits")
    step = lambda name: float(parts[parts.step == name].other_bits.max())  # noqa: E731
    return {
        "id": f"{prefix}-round-activations", "claim": "Rounding the GEMV's activations alone does not make the two paths agree in bits",
        "holds": other > 0, "value": round(other, 6), "expected": "> 0 of values", "n": int(agreement["values"].sum()),
        "negative_control": step("GEMV, run again") == 0, "positive_control": _apart(agreement, "default", "other_bits") > 0,
        "occurred": step("only activation rounding") > 0,
    }


def agreement_sentence(agreement: pd.DataFrame, variants: pd.DataFrame) -> str:
    default, rounded, exact = (_apart(agreement, name) for name in ("default", "round-activations", "round-activations-exact-weights"))
    summary = agreement_summary(agreement)
    apart = lambda value, name: cite(f"{value:.1e}", summary, policy=name)  # noqa: E731
    texts = "; ".join(f"{name}: {cite('{1} of {2}'.format(*total_variants(variants, name)), variants, policy=name)} requests changed text"
                      for name in ("round-activations", "round-activations-exact-weights") if name in set(variants.policy))
    name = "round-activations-exact-weights"
    bits = cite(f"{_apart(agreement, name, 'other_bits'):.1%}", summary, policy=name)
    return (f"No. It takes the distance between the paths from {apart(default, 'default')} to {apart(rounded, 'round-activations')}: weight rounding is left, and is about as large. "
            f"With the tensor scale applied to the sum as well, {apart(exact, 'round-activations-exact-weights')} is left, the order of additions alone; the share of values "
            f"with other bits is then {bits}, not zero."
            + (f" In text, {texts}." if texts else " The texts under these two policies are in the full report."))


# --- Recorded on a GPU ---


def recorded_tables(ffn: str) -> dict[str, pd.DataFrame] | None:
    """The recorded tables of one kind of FFN, None when they are not all there."""
    found = {name: named(recorded(name, ffn), f"recorded-{ffn}-{name}") for name in RECORDED_TABLES}
    return None if any(frame.empty for frame in found.values()) else found


def recorded_sentence(found: dict[str, dict[str, pd.DataFrame]]) -> str:
    """Which GPU runs are shown, or that none is."""
    if not found:
        return "No GPU run of this study is recorded: run it with `--device cuda -p record=data/recorded` to add one."
    return "Recorded: " + "; ".join(f"{ffn} ({tables['variants'].label.iloc[0]})" for ffn, tables in found.items()) + "."


def recorded_verdicts(ffn: str, tables: dict[str, pd.DataFrame]) -> list[dict]:
    control = tables["control"]
    invariant = bool((control[~control.planted]["rows that differ"] == 0).all())
    caught = bool((control[control.planted]["rows that differ"] > 0).all())
    differ = bool(tables["variants"].solo_texts_differ.all())
    return policy_verdicts(tables["variants"], tables["pairs"], tables["crossings"], differ, invariant, caught, prefix=f"01.h200-{ffn}")


def conclusion(setup: Setup, variants: pd.DataFrame, parts: pd.DataFrame, agreement: pd.DataFrame) -> str:
    """The answers to the issue's questions, from this run's numbers and the recorded ones."""
    lines = []
    for tier, label, table in [(setup.tier, setup.weights.label, variants)] + [
        ("recorded-gpu", found["variants"].label.iloc[0], found["variants"])
        for found in map(recorded_tables, ("moe", "dense")) if found
    ]:
        default = Rate(*total_variants(table, "default")[1:])
        forced = [Rate(*total_variants(table, name)[1:]) for name in dict.fromkeys(table.policy) if name.startswith("force-")]
        ended = all(rate.events == 0 for rate in forced)
        lines.append(
            f"- **{label}** ({tier}): under the default dispatch {cite(default, table, policy='default')} requests differ from the prompt "
            f"alone; with one path forced, {cite(f'{sum(r.events for r in forced)} of {sum(r.trials for r in forced)}', table)}. Forcing one path {'ends' if ended else 'does not end'} the variance here.")
    whole, rounded = _apart(agreement, "default"), _apart(agreement, "round-activations")
    summary = agreement_summary(agreement)
    lines.append(
        f"- **The issue names activation precision. It is half of it.** Rounding the activations of the GEMV takes the paths' distance from "
        f"{cite(f'{whole:.1e}', summary, policy='default')} to {cite(f'{rounded:.1e}', summary, policy='round-activations')}; the rest is the tensor scale multiplied into the weights before they are rounded to bfloat16 "
        "(an assumption about gllm's unpacking, which the issue does not describe).")
    lines.append(
        "- **Same tree, same bits.** Even with every operand rounded alike, the two kernels add in different orders and a share of values keeps "
        "other bits. Agreement on precision shrinks the difference; only one order of additions removes it.")
    return "\n".join(lines)
