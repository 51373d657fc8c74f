"""Notebook 03's study: forced texts, spans and margins by hand, and its tables, verdicts and figures on a tiny
model.
"""

import ast
import json
from dataclasses import replace
from functools import partial

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt  # noqa: E402
import nbformat  # noqa: E402
import numpy as np  # noqa: E402
import pandas as pd  # noqa: E402
import pytest  # noqa: E402
import torch  # noqa: E402

from batch_variance.common import BadInput  # noqa: E402
from batch_variance.common.data import repository  # noqa: E402
from batch_variance.engine import EngineConfig, Load, Mechanisms, Settings, build, load_weights, serve  # noqa: E402
from batch_variance.kernels.sets import kernel_set  # noqa: E402
from batch_variance.reporting.checks import judge  # noqa: E402
from batch_variance.reporting.drawings import source_of  # noqa: E402
from batch_variance.reporting.parameters import read_defaults, read_parameters_file, read_settings  # noqa: E402
from batch_variance.reporting.plots import concurrency as plots  # noqa: E402
from batch_variance.studies import concurrency as study  # noqa: E402
from batch_variance.studies import concurrency_findings as findings  # noqa: E402
from batch_variance.studies import concurrency_tables as tabled  # noqa: E402
from batch_variance.studies import forcing, spans  # noqa: E402
from batch_variance.studies.sources import plain

TOKENS = 6
PROMPTS = [[256, 7, 8, 9], [256, 70, 80, 90, 100, 110, 120], [256] + list(range(30, 52)), [256, 5]]


@pytest.fixture(scope="module")
def weights(tiny_folder):
    return load_weights(tiny_folder, torch.device("cpu"), nvfp4=True)


def _served(weights, settings, concurrency):
    model, changes = build(weights, kernel_set(torch.device("cpu")), settings)
    return model, EngineConfig(max_requests=concurrency, max_length=40, ignore_eos=True, **changes)


@pytest.fixture(scope="module", params=["bfloat16", "float32"])
def case(request, weights):
    """(settings, model, solo reference) with every mechanism on and a threshold that a tiny batch crosses."""
    settings = Settings(mechanisms=Mechanisms.all(), storage=request.param, threshold=4)
    model, config = _served(weights, settings, 1)
    return settings, model, forcing.solo(model, PROMPTS, TOKENS, config, request.param)


# --- Forcing ---


def test_alone_and_free_is_the_engine_s_own_text(case):
    _, model, alone = case
    config = EngineConfig(max_requests=1, max_length=40, ignore_eos=True)
    plain = serve(model, PROMPTS, Load(1, len(PROMPTS), TOKENS, seed=0), _as_built(case, config))
    assert {r.prompt: r.output for r in plain.requests} == alone.texts
    margins = alone.margins().pivot(index="prompt", columns="position", values="margin").to_numpy()
    assert margins.tolist() == [r.margins for r in plain.requests]
    assert (margins >= 0).all() and alone.logits.shape == (4, TOKENS, 272) and alone.hidden.shape == (4, TOKENS, 64)


def _as_built(case, config):
    _, changes = build(case[1].weights, kernel_set(torch.device("cpu")), case[0])
    return replace(config, **changes)


def test_forced_alone_nothing_moves(case):
    settings, model, alone = case
    found = forcing.measure(
        model,
        PROMPTS,
        alone,
        Load(1, 8, TOKENS, seed=3),
        _as_built(case, EngineConfig(max_requests=1, max_length=40, ignore_eos=True)),
        {"concurrency": 1},
    )
    assert (
        len(found.positions) == 8 * TOKENS and not found.positions.flipped.any() and (found.positions.noise == 0).all()
    )
    assert found.positions[["hidden_largest_ulp", "logits_largest_ulp", "hidden_other_bits"]].to_numpy().max() == 0
    moved = found.values[found.values.up_to > 0]["values"].sum()
    assert moved == 0 and found.values["values"].sum() == 8 * TOKENS * (64 + 272)


def test_forced_in_a_batch_bits_move_and_contexts_do_not(case):
    settings, model, alone = case
    config = _as_built(case, EngineConfig(max_requests=8, max_length=40, ignore_eos=True))
    engines = []

    def watch(requests, hidden, logits, chosen):
        engines.append(([(r.prompt, list(r.output)) for r in requests], logits.clone(), hidden.clone(), chosen))

    run = serve(
        model,
        PROMPTS,
        Load(8, 16, TOKENS, seed=3),
        config,
        build=partial(forcing.ForcedEngine, texts=alone.texts, notice=watch),
    )
    assert all(r.output == alone.texts[r.prompt] for r in run.requests)
    found = forcing.measure(
        model, PROMPTS, alone, Load(8, 16, TOKENS, seed=3), config, {"concurrency": 8, "run": "F"}
    ).positions
    assert (found.hidden_other_bits > 0).any() and (found.concurrency == 8).all()
    # The numbers of one step again, from the tensors that the engine showed.
    said, logits, hidden, chosen = engines[-1]
    prompt, output = said[0]
    position = len(output)
    assert output == alone.texts[prompt][:position]
    number = [r.number for r in run.requests if r.prompt == prompt]
    rows = found[(found.prompt == prompt) & (found.position == position) & found.request.isin(number)]
    best, second = int(alone.best[prompt, position]), int(alone.second[prompt, position])
    noise = float(logits[0, best] - logits[0, second]) - float(
        alone.logits[prompt, position, best] - alone.logits[prompt, position, second]
    )
    assert noise in rows.noise.tolist() and chosen[0] in rows.chosen.tolist()
    assert (rows.flipped == (rows.chosen != best)).all()
    share = float((hidden[0] != alone.hidden[prompt, position]).double().mean())
    assert share in rows.hidden_other_bits.tolist()


def test_row_scaled_ranges_count_each_value_once(case):
    settings, model, alone = case
    found = forcing.measure(
        model,
        PROMPTS,
        alone,
        Load(4, 4, TOKENS, seed=0),
        _as_built(case, EngineConfig(max_requests=4, max_length=40, ignore_eos=True)),
        {"concurrency": 4},
    )
    for kind, width in zip(forcing.KINDS, (64, 272)):
        part = found.values[found.values.kind == kind]
        assert part["values"].sum() == 4 * TOKENS * width
        zero = 1 - found.positions[f"{kind.split()[0]}_other_bits"].mean()
        assert part[part.up_to == 0]["values"].sum() / part["values"].sum() == pytest.approx(zero)


# --- Spans ---


def _requests(*rows, **more):
    return pd.DataFrame([dict(zip(("concurrency", "prompt", "first_divergence"), row)) for row in rows]).assign(**more)


def test_survival_by_hand():
    found = spans.survival(_requests((8, 0, 0), (8, 0, 2), (8, 1, 2), (8, 1, -1), (1, 0, -1)), 4)
    assert found[found.concurrency == 8].share.tolist() == [1.0, 0.75, 0.75, 0.25, 0.25]
    assert found[found.concurrency == 1].share.tolist() == [1.0] * 5
    part = found[found.concurrency == 8]
    assert ((part.low <= part.share) & (part.share <= part.high)).all()


def test_survival_when_all_diverge_at_once():
    found = spans.survival(_requests((8, 0, 0), (8, 0, 0)), 2)
    assert found.share.tolist() == [1.0, 0.0, 0.0] and found[["low", "high"]].notna().all(axis=None)


def test_second_spans_by_hand():
    alone = "1 2 3 4 5 6"
    requests = _requests(
        (8, 0, 1), (8, 0, 2), (8, 0, 5), (8, 0, -1), (8, 0, 0), run="A", request=range(5), alone=alone
    ).assign(text=["1 9 3 4 9 6", "1 2 9 9 5 6", "1 2 3 4 5 9", alone, "9 2 3 4 5 6"])
    found = spans.second_spans(requests).set_index("request")
    assert found.second_span.tolist() == [2, 0, 0, 5] and found.censored.tolist() == [False, False, True, True]
    assert found.agree_after.tolist()[:2] == [0.75, pytest.approx(2 / 3)] and np.isnan(found.agree_after[2])
    summary = spans.span_summary(requests, found.reset_index(), 6).iloc[0]
    assert (summary["diverged"], summary["second span 0"], summary["censored"]) == (4, 1, 2)
    assert summary["median first span"] == 2  # of 0, 1, 2, 5 and one that never parted, half are over after 2 tokens
    assert spans.second_spans(requests[requests.first_divergence < 0]).empty


# --- Margins ---


def _positions(scale, prompts=6, length=40, seed=0):
    solo = np.random.default_rng(seed).exponential(2, (prompts, length)) + 0.01
    return pd.DataFrame(
        [
            {"concurrency": 8, "prompt": p, "position": t, "solo_margin": solo[p, t], "margin": solo[p, t] * scale}
            for p in range(prompts)
            for t in range(length)
        ]
    )


def test_a_shrunken_margin_is_seen_and_noise_is_not():
    same = spans.median_ratio(_positions(1.0)).iloc[0]
    assert (same.ratio, same.low, same.high, same["margins that moved"]) == (1, 1, 1, 0)
    assert spans.median_ratio(_positions(0.5)).iloc[0].high == pytest.approx(0.5)
    noisy = _positions(1.0)
    noisy["margin"] += np.random.default_rng(1).normal(0, 0.1, len(noisy))
    found = spans.median_ratio(noisy).iloc[0]
    assert found.low <= 1 <= found.high and found["margins that moved"] == 1


def test_near_ties_are_told_from_any_place():
    margins = _positions(1.0)[["prompt", "position", "margin"]]
    smallest = margins.sort_values("margin").groupby("prompt").head(2)
    tied = spans.near_ties(pd.concat([smallest, smallest]), margins)
    assert (
        tied["places"] == 12
        and tied["p"] < 0.001
        and tied["mean_rank"] < 0.05
        and tied["expected"] == pytest.approx(0.5, abs=0.01)
    )
    random, small = np.random.default_rng(3), 0
    for seed in range(60):
        anywhere = margins.groupby("prompt").sample(2, random_state=random.integers(2**31))
        small += spans.near_ties(anywhere, margins, draws=400, seed=seed)["p"] <= 0.1
    assert small <= 12  # 10% of 60 expected; 13 or more have a chance of 1%
    assert np.isnan(spans.near_ties(smallest.head(0), margins)["p"])


def test_the_margin_at_a_divergence_is_looked_up_on_both_sides():
    requests = _requests((8, 0, 1), (8, 0, -1), run="A", request=[0, 1], margins="3.0 0.25 1.0")
    margins = pd.DataFrame({"prompt": 0, "position": [0, 1, 2], "margin": [3.0, 0.5, 1.0]})
    found = spans.at_divergence(requests, margins)
    assert len(found) == 1 and (found.margin[0], found.solo_margin[0], found.position[0]) == (0.25, 0.5, 1)


def test_the_trend_test_sees_a_rise_and_not_a_fall():
    random = np.random.default_rng(0)

    def drawn(shares):
        return pd.concat(
            [
                _requests(*[(c, p, 3 if random.random() < share else -1) for p in range(8) for _ in range(10)])
                for c, share in shares.items()
            ]
        )

    up = spans.trend(drawn({1: 0, 2: 0.1, 8: 0.25, 64: 0.5}), draws=300)
    assert up["p"] < 0.01 and up["correlation"] > 0.2 and up["lowest"] < up["highest"]
    assert spans.trend(drawn({2: 0.5, 64: 0.1}), draws=300)["p"] > 0.9
    assert np.isnan(spans.trend(drawn({1: 0, 8: 0.3}))["p"]) and np.isnan(spans.trend(drawn({2: 0, 8: 0}))["p"])


# --- The study on a tiny model ---

NOTEBOOK = "03_concurrency"
TEXTS = ["Why?", "What is a batch of rows?", "Name three colours, please.", "x"]


@pytest.fixture(scope="module")
def values(tiny_folder, tmp_path_factory):
    """Parameters that fit the tiny model, with experts so that every mechanism can act."""
    prompts = tmp_path_factory.mktemp("prompts") / "prompts.json"
    prompts.write_text(json.dumps(TEXTS))
    return dict(
        model=str(tiny_folder),
        ffn="moe",
        experts=6,
        top_k=4,
        expert_split="contiguous",
        mechanisms=["all"],
        threshold=4,
        storage="bfloat16",
        logits="float32",
        concurrencies=[1, 4, 8],
        requests=16,
        alone_requests=4,
        forced_requests=32,
        twin_concurrencies=[8],
        parity_concurrency=8,
        tokens=8,
        stop_width=0.0,
        prompts=str(prompts),
        prompt_count=4,
        seed=0,
        device="cpu",
        processes=2,
        record="",
    )


@pytest.fixture(scope="module")
def setup(values):
    return study.prepare(study.Parameters.checked(values))


@pytest.fixture(scope="module")
def results(setup):
    return study.Results(study.serve_free(setup), study.serve_forced(setup))


@pytest.fixture(scope="module")
def tables(setup, results):
    return tabled.tables(setup, results)


def test_parameters_are_the_notebook_s_and_its_values_are_good():
    folder = repository() / "notebooks"
    notebook = nbformat.read(folder / f"{NOTEBOOK}.ipynb", 4)
    cell = next(c for c in notebook.cells if "parameters" in c.metadata.get("tags", []))
    assert [line.targets[0].id for line in ast.parse(cell.source).body] == list(study.Parameters.model_fields)
    assert all("  # " in line for line in cell.source.splitlines())
    assert all(
        not c.get("outputs") and len(c.source.splitlines()) <= 15
        for c in notebook.cells
        if c is not cell and c.cell_type == "code"
    )
    defaults = read_defaults(folder / f"{NOTEBOOK}.ipynb")
    full = study.Parameters.checked(defaults)
    assert full.concurrencies == [1, 2, 4, 8, 16, 32, 64] and full.settings.mechanisms == Mechanisms.all()
    _, given = read_parameters_file(folder / "gpu.yaml")
    mine = {name.removeprefix("03."): value for name, value in given.items() if name.startswith("03.")}
    recorded = study.Parameters.checked(defaults | mine)
    assert recorded.requests >= 1000 and {8, 32, 64} <= set(recorded.twin_concurrencies)
    quick = study.Parameters.checked(defaults | read_settings(folder).get(NOTEBOOK, {}).get("quick", {}))
    assert quick.requests <= full.requests


@pytest.mark.parametrize(
    "change, words",
    [
        (dict(concurrencies=[1, 0]), "concurrencies = [1, 0]: give different whole numbers from 1"),
        (dict(concurrencies=[4, 8]), "give different whole numbers from 1"),
        (dict(concurrencies=[1]), "at least one above it"),
        (dict(mechanisms=[]), "name at least one mechanism"),
        (dict(mechanisms=["split_k", "split_k"]), "each once"),
        (dict(mechanisms=["luck"]), "mechanism 'luck' is unknown"),
        (dict(storage="float16"), "storage = 'float16' cannot be used"),
        (dict(requests=0), "requests = 0 cannot be used"),
        (dict(tokens=1), "tokens = 1 cannot be used"),
        (dict(parity_concurrency=4), "is not among twin_concurrencies = [8]"),
        (dict(twin_concurrencies=[8, 16]), "name some of [4, 8]"),
        (dict(twin_concurrencies=[8, 8]), "each once"),
        (dict(stop_width=1.5), "stop_width = 1.5: stop_width = 1.5 cannot be used"),
        (dict(prompt_count=1), "give at least two"),
        (dict(prompt_count=10**6), "is out of range"),
        (dict(prompts="nowhere.json"), "there is no file nowhere.json"),
        (dict(threshold=-1), "threshold = -1 cannot be used"),
        (dict(top_k=7), "top_k = 7 does not fit 6 experts"),
        (dict(device="tpu"), "device 'tpu' is unknown"),
        (dict(rows=3), "rows = 3 cannot be used"),
    ],
)
def test_a_bad_parameter_is_one_sentence(values, change, words):
    with pytest.raises(BadInput) as caught:
        study.Parameters.checked(values | change)
    assert words in str(caught.value) and str(caught.value).endswith(".")


def test_every_cell_is_served_whole(results, setup):
    free = results.requests
    sizes = free.groupby(["concurrency", "run"]).size()
    assert {key: int(size) for key, size in sizes.items()} == {
        (1, "A"): 4,
        (1, "B"): 4,
        (4, "A"): 16,
        (4, "B"): 16,
        (8, "A"): 16,
        (8, "B"): 16,
        (8, "C"): 16,
        (8, "twin"): 16,
    }
    assert (free.text.str.split().str.len() == 8).all() and (free.margins.str.split().str.len() == 8).all()
    assert (free.first_divergence[free.concurrency == 1] == -1).all()
    assert (free[free.run != "twin"].first_divergence >= 0).any() and (
        free[free.run == "twin"].first_divergence == -1
    ).all()
    forced = results.forced.positions
    assert forced.groupby("concurrency").request.nunique().to_dict() == {1: 4, 4: 32, 8: 32} and len(forced) == 68 * 8
    assert not forced.duplicated(["concurrency", "request", "position"]).any()


def test_alone_is_the_same_text_however_it_is_served(results, setup):
    mine = results.requests[results.requests.run == "A"].drop_duplicates("prompt").set_index("prompt").alone
    assert {prompt: [int(t) for t in text.split()] for prompt, text in mine.items()} == setup.solo.texts


def test_first_divergence_is_where_the_margins_stop_being_comparable(results, setup):
    places = spans.at_divergence(results.requests[results.requests.run.isin(["A", "B"])], setup.solo.margins())
    assert len(places) == (results.requests[results.requests.run.isin(["A", "B"])].first_divergence >= 0).sum() > 0
    assert (places.solo_margin >= 0).all() and (places.margin >= 0).all()


def test_margins_beside_a_text_are_those_its_own_request_met(results, setup):
    """Alone: as the forced engine has them, from logits of its own. In the batch: second candidates are never the chosen."""
    margins = setup.solo.margins().set_index(["prompt", "position"])
    some = results.requests[results.requests.run == "A"].drop_duplicates("prompt")
    for row in some.itertuples():
        solo = margins.loc[row.prompt]
        assert [float(one) for one in row.alone_margins.split()] == solo.margin.tolist()
        assert [int(one) for one in row.alone_runners_up.split()] == solo.second.tolist()
    for row in results.requests.itertuples():
        chosen, second = row.text.split(), row.runners_up.split()
        assert len(chosen) == len(second) and not any(a == b for a, b in zip(chosen, second))


def test_forced_runs_move_bits_in_batches_only(results):
    forced = results.forced.positions
    assert forced[forced.concurrency == 1].flipped.sum() == 0
    assert forced[forced.concurrency > 1].logits_other_bits.max() > 0


def test_tables_count_what_was_served(tables, results):
    outputs = tables["outputs"].set_index(["concurrency", "run"])
    part = results.requests[(results.requests.concurrency == 8) & (results.requests.run == "A")]
    assert outputs.loc[(8, "A"), "differ from alone"] == (part.text != part.alone).sum()
    assert outputs.loc[(8, "A"), "most variants"] == part.groupby("prompt").text.nunique().max()
    assert (outputs.low <= outputs["differ from alone"] / outputs.requests).all() and (
        outputs["worth independent"] <= outputs.requests
    ).all()
    pairs = tables["pairs"].set_index("concurrency")
    both = results.requests[results.requests.concurrency == 8].pivot(index="request", columns="run", values="text")
    assert pairs.loc[8, "differ between A and B"] == (both.A != both.B).sum() and pairs.loc[1, "exact match"] == 1
    shares = tables["ulp_shares"]
    assert shares[(shares.concurrency == 1)].further.max() == 0 and shares[shares.concurrency == 8].further.max() > 0
    assert set(tabled.TABLES) == set(tables)


def test_verdicts_pass_their_shape_and_can_fail(tables):
    found = {v["id"]: judge(tier="emulated", **v) for v in findings.verdicts(tables)}
    assert {name: found[name].verdict for name in ("03.texts-depend", "03.twin-invariant")} == {
        "03.texts-depend": "pass",
        "03.twin-invariant": "pass",
    }
    broken = dict(tables, outputs=tables["outputs"].assign(**{"differ from alone": 1}))
    again = {v["id"]: judge(tier="emulated", **v) for v in findings.verdicts(broken)}
    assert again["03.twin-invariant"].verdict == "fail" and again["03.texts-depend"].verdict == "inconclusive"
    quiet = dict(tables, outputs=tables["outputs"].assign(**{"differ from alone": 0}))
    assert {v["id"]: judge(tier="emulated", **v).verdict for v in findings.text_verdicts(quiet)} == {
        "03.texts-depend": "fail",
        "03.twin-invariant": "inconclusive",
    }
    shrunk = dict(
        tables,
        ratios=tables["ratios"].assign(ratio=lambda f: f.ratio.where(f.concurrency == 1, 0.4), low=0.3, high=0.5),
    )
    verdict = findings.margin_verdicts(shrunk)[0]
    assert verdict["holds"] is False and verdict["value"] == 0.4


def test_sentences_carry_the_tables_numbers(tables):
    changed = tables["outputs"][(tables["outputs"].concurrency > 1) & tables["outputs"].run.isin(["A", "B"])]
    assert (
        f"in all {int(changed['differ from alone'].sum())} of {int(changed.requests.sum())}"
        in plain(findings.outputs_sentence(tables))
    )
    assert (
        f"same text for {1 - tables['pairs'].set_index('concurrency').loc[4, 'differ between A and B'] / 16:.1%} at 4"
        in plain(findings.pairs_sentence(tables))
    )
    for say in findings.SENTENCES:
        text = say(tables)
        assert text.endswith(".") and "nan" not in text.replace("nance", ""), text


def test_a_run_in_which_nothing_diverges_is_told_as_such(setup, results):
    still = results.requests.assign(text=results.requests.alone, first_divergence=-1)
    found = tabled.tables(setup, study.Results(still, results.forced))
    for say in findings.SENTENCES:
        assert say(found).endswith(".")
    assert "No text diverged" in plain(findings.margins_sentence(found)) and "No text diverged" in plain(findings.spans_sentence(found))
    verdicts = {v["id"]: judge(tier="emulated", **v).verdict for v in findings.verdicts(found)}
    assert verdicts["03.texts-depend"] == "fail" and verdicts["03.margins-unmoved"] == "inconclusive"
    assert verdicts["03.near-ties"] == verdicts["03.prediction"] == verdicts["03.parity-null"] == "inconclusive"
    for fig in (
        plots.survival(found["survival"], found["second_span"]),
        plots.margins(found["margin_curves"], found["ratios"]),
        plots.calibration(found["calibration"]),
    ):
        plt.close(fig)
    assert "collapse" not in plain(findings.conclusion(setup, found, {}))


def test_a_pair_of_texts_is_shown_with_its_candidates(setup):
    pair = study.closer_look(setup)
    assert pair is not None and not pair.tokens.same[pair.split] and pair.tokens.same[: pair.split].all()
    alone = pair.candidates[pair.candidates.served == "alone"]
    assert alone.logit.iloc[0] >= alone.logit.iloc[1] and alone.chosen.tolist() == [True, False]
    # On a dark page the page's own light ink would stand on the light marking.
    marked = plots.texts_html(pair.tokens, "<b>", pair.split)
    assert marked.count("background:") == marked.count(";color:") > 0
    assert "outline" in plots.texts_html(pair.tokens, "<b>", pair.split) and "&lt;b&gt;" in plots.texts_html(
        pair.tokens, "<b>", pair.split
    )
    assert f"At token {pair.split}" in plain(findings.pair_sentence(pair)) and "no pair to show" in plain(findings.pair_sentence(
        None
    ))
    assert len(pair.around(1, 1)) <= 3


def test_stopping_early_serves_fewer_and_says_so(values):
    wide = study.prepare(study.Parameters.checked(values | dict(stop_width=0.6, requests=400, tokens=2)))
    served = study.serve_free(wide)
    sizes = served[served.concurrency > 1].groupby(["concurrency", "run"]).size()
    assert (
        (sizes < 400).all()
        and (sizes % 4 == 0).all()
        and not served.duplicated(["concurrency", "run", "request"]).any()
    )
    assert "0.6 wide" in plain(findings.power_sentence(wide.p))


def test_tables_are_recorded_and_read_back_as_they_were(setup, tables, tmp_path, monkeypatch):
    monkeypatch.setattr("batch_variance.studies.recordings.data_path", lambda *parts: tmp_path.joinpath(*parts[1:]))
    assert tabled.save(setup, tables) == [] and tabled.recorded("moe") is None
    stored = replace(setup, p=setup.p.model_copy(update={"record": str(tmp_path)}))
    assert len(tabled.save(stored, tables)) == len(tabled.TABLES)
    found = tabled.recorded("moe")
    said = findings.recorded_paragraph(found)
    assert plain(said) == plain("\n\n".join(say(tables) for say in findings.SENTENCES))
    assert 'data-source="recorded-moe-' in said and 'data-source="outputs' not in said, "it cites its own tables"
    ours, theirs = findings.verdicts(tables), findings.verdicts(found)
    assert [(v["id"], v["holds"], v["occurred"]) for v in ours] == [
        (v["id"], v["holds"], v["occurred"]) for v in theirs
    ]
    assert list(tabled.unstamped(found["outputs"]).columns) == list(tables["outputs"].columns)
    assert "1 run" not in plain(findings.recorded_sentence({})) and "experts" in plain(findings.recorded_sentence({"moe": found}))
    assert plain(findings.conclusion(setup, tables, {"moe": found})).count("recorded-gpu") == 1


def test_every_figure_draws_live_and_recorded_alike(tables, setup):
    pair = study.closer_look(setup)
    figures = [
        plots.outputs(tables["outputs"], tables["pairs"], "label"),
        plots.ulp_distribution(tables["ulp_shares"]),
        plots.margins(tables["margin_curves"], tables["ratios"]),
        plots.survival(tables["survival"], tables["second_span"]),
        plots.predicted_and_observed(tables["levels"]),
        plots.calibration(tables["calibration"]),
        plots.parity(tables["parity"][tables["parity"].over == "prompts"]),
        plots.candidates(pair.candidates),
        plots.survival(tables["survival"], tables["second_span"].head(0)),
        plots.ulp_distribution(tables["ulp_shares"].assign(further=0.0)),
    ]
    for fig in figures:
        fig.draw_without_rendering()
        assert (
            all(ax.get_xlabel() or ax.get_title(loc="left") for ax in fig.axes if ax.get_visible())
            and source_of(fig) is not None
        )
        plt.close(fig)
