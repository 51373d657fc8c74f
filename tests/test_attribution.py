"""The attribution study: estimators against games with known values, counts against a tiny engine, verdicts, records
and figures."""

import itertools
from dataclasses import replace
from functools import partial

import matplotlib
import numpy as np
import pandas as pd
import pytest
from scipy.stats import fisher_exact

matplotlib.use("Agg")

from batch_variance.common import BadInput, exact_interval  # noqa: E402
from batch_variance.engine import Mechanisms, Settings  # noqa: E402
from batch_variance.reporting import judge  # noqa: E402
from batch_variance.reporting.plots import attribution as plots  # noqa: E402
from batch_variance.studies import attribution as study  # noqa: E402
from batch_variance.studies import attribution_findings as findings  # noqa: E402
from batch_variance.studies import attribution_measuring as measuring  # noqa: E402
from batch_variance.studies import attribution_recording as recording  # noqa: E402
from batch_variance.studies.attribution_design import (  # noqa: E402
    Design,
    budget,
    clear_pairs,
    coalition_of,
    interactions,
    resampled_worth,
    reversed_pairs,
    shapley,
)
from batch_variance.studies.attribution_measuring import AMPLIFIERS, BASE, Plan, applicable  # noqa: E402
from batch_variance.studies.cells import Cell, Subject  # noqa: E402
from batch_variance.studies.sources import plain

NAMES = ("row_threshold", "split_k", "expert_order", "norm_blocks")
EVERY = [Design(NAMES, "ends"), Design(NAMES, "orders", 2, seed=3), Design(NAMES, "factorial")]


def worth_of(design, game):
    return {coalition: np.array([float(game(set(coalition)))]) for coalition in design.coalitions()}


def value_of(design, game):
    return {name: float(value[0]) for name, value in shapley(design, worth_of(design, game)).items()}


# --- designs


def test_coalitions_of_each_design():
    ends, orders, factorial = (design.coalitions() for design in EVERY)
    assert len(ends) == 10 and len(factorial) == 16 and set(ends) <= set(orders) <= set(factorial)
    for found in (ends, orders, factorial):
        assert found[0] == () and found[-1] == NAMES and len(set(found)) == len(found)
        assert all(coalition == tuple(n for n in NAMES if n in coalition) for coalition in found)
    assert len(Design(("split_k", "norm_blocks"), "ends").coalitions()) == 4
    drawn = EVERY[1].random_orders()
    assert len(drawn) == 4 and drawn[1] == drawn[0][::-1] and all(sorted(order) == sorted(NAMES) for order in drawn)
    assert drawn == EVERY[1].random_orders() != Design(NAMES, "orders", 2, seed=4).random_orders()


@pytest.mark.parametrize(
    "change,name",
    [
        ({"mechanisms": ()}, "mechanisms"),
        ({"mechanisms": ("split_k", "split_k")}, "mechanisms"),
        ({"kind": "half"}, "half"),
        ({"kind": "orders", "orders": 0}, "orders"),
    ],
)
def test_wrong_designs_are_refused(change, name):
    with pytest.raises(BadInput, match=name):
        Design(**({"mechanisms": NAMES} | change))


# --- estimators, on games whose values are known


@pytest.mark.parametrize("design", EVERY, ids=lambda d: d.kind)
def test_an_additive_game_is_split_into_its_terms(design):
    terms = dict(zip(NAMES, (0.25, 0.0, 0.5, 0.125)))
    assert value_of(design, lambda s: sum(terms[n] for n in s)) == terms


def test_a_pair_that_is_needed_together_shares_evenly():
    pair = {"split_k", "norm_blocks"}
    for design in (EVERY[0], EVERY[2]):
        assert value_of(design, lambda s: pair <= s) == pytest.approx({n: 0.5 * (n in pair) for n in NAMES})
    found = value_of(EVERY[1], lambda s: pair <= s)  # an order and its reverse: each is last once
    assert found == pytest.approx({n: 0.5 * (n in pair) for n in NAMES})


def test_the_exact_value_is_the_mean_over_all_orders_and_adds_up():
    random = np.random.default_rng(0)
    table = {coalition: random.random() for coalition in EVERY[2].coalitions()}
    game = lambda s: table[tuple(n for n in NAMES if n in s)]  # noqa: E731
    by_orders = {n: 0.0 for n in NAMES}
    for order in itertools.permutations(NAMES):
        for i, name in enumerate(order):
            by_orders[name] += (game(set(order[: i + 1])) - game(set(order[:i]))) / 24
    assert value_of(EVERY[2], game) == pytest.approx(by_orders)
    for design in EVERY[1:]:
        assert sum(value_of(design, game).values()) == pytest.approx(game(set(NAMES)) - game(set()))


def counts(rates, design, prompts=20, requests=50, seed=0, spread=0.0):
    """by_prompt rows in which mechanisms change requests independently at these rates."""
    random = np.random.default_rng(seed)
    rows = []
    for coalition in design.coalitions():
        rate = 1 - np.prod([1 - rates[n] for n in coalition])
        for prompt in range(prompts):
            mine = np.clip(rate * (1 + spread * (-1) ** prompt), 0, 1)
            rows.append(
                {
                    "mechanisms": "+".join(coalition) or "none",
                    "prompt": prompt,
                    "requests": requests,
                    "changed": random.binomial(requests, mine),
                    "seed": prompt % 2,
                }
            )
    return pd.DataFrame(rows)


@pytest.mark.parametrize("design", EVERY, ids=lambda d: d.kind)
def test_mechanisms_of_known_strength_are_ranked_right(design):
    rates = dict(zip(NAMES, (0.05, 0.4, 0.0, 0.15)))
    found = budget(counts(rates, design), design)
    assert found.mechanism.tolist() == sorted(NAMES, key=lambda n: -rates[n])
    for row in found.to_dict("records"):
        assert row["share low"] <= row["share"] <= row["share high"]
        assert row["on alone low"] <= rates[row["mechanism"]] <= row["on alone high"]
    assert abs(found.set_index("mechanism").loc["expert_order", "share"]) < 0.04
    pairs = clear_pairs(counts(rates, design), design)
    assert ("split_k", "row_threshold") in pairs and all(rates[a] > rates[b] for a, b in pairs)


def test_intervals_resample_prompts_not_requests():
    """A single prompt that always changes: many requests of it are still one prompt."""
    design = Design(("split_k", "norm_blocks"))
    frame = counts({"split_k": 0.0, "norm_blocks": 0.0}, design, prompts=5, requests=200)
    frame.loc[(frame.prompt == 0) & frame.mechanisms.str.contains("split_k"), "changed"] = 200
    row = budget(frame, design).iloc[0]
    assert row.mechanism == "split_k" and row.share == pytest.approx(0.2)
    assert row["share low"] == 0 and row["share high"] >= 0.6
    worth = resampled_worth(frame)
    assert worth[("split_k",)][0] == pytest.approx(0.2) and set(np.round(worth[("split_k",)][1:], 6)) <= {
        0,
        0.2,
        0.4,
        0.6,
        0.8,
        1.0,
    }
    assert np.array_equal(worth[("split_k",)], worth[("split_k", "norm_blocks")])  # draws are paired


def test_prompts_of_unequal_size_weigh_by_their_requests():
    frame = pd.DataFrame(
        [
            {"mechanisms": "none", "prompt": 0, "requests": 90, "changed": 0},
            {"mechanisms": "none", "prompt": 1, "requests": 10, "changed": 10},
        ]
    )
    assert resampled_worth(frame)[()][0] == pytest.approx(0.1)


def test_interactions_are_stated():
    design = Design(("split_k", "norm_blocks"), "factorial")
    rows = [("none", 0), ("split_k", 50), ("norm_blocks", 50), ("split_k+norm_blocks", 75)]
    frame = pd.DataFrame(
        [{"mechanisms": m, "prompt": p, "requests": 100, "changed": c} for m, c in rows for p in range(4)]
    )
    found = interactions(frame, design).set_index("quantity")
    assert found.value.to_dict() == pytest.approx(
        {
            "all on": 0.75,
            "sum of each on alone": 1.0,
            "independent changes of each on alone": 0.75,
            "sum of each off alone": 0.5,
            "sum of the budget's shares": 0.75,
        }
    )
    assert found["all on minus it"].to_dict()["sum of each on alone"] == pytest.approx(-0.25)
    assert (found.low == found.value).all() and (found.high == found.value).all()  # prompts alike


def test_reversed_pairs():
    pairs = [("a", "b"), ("c", "b")]
    assert reversed_pairs(pairs, {"a": 1, "b": 2, "c": 3}) == [("a", "b")]
    assert reversed_pairs(pairs, {"a": 2, "b": 2, "c": 3}) == [] and reversed_pairs([], {"a": 1}) == []
    assert coalition_of("none") == () and coalition_of("split_k+norm_blocks") == ("split_k", "norm_blocks")


# --- 1 of 200 against 2 of 200


def test_fishers_table_against_scipy():
    for n in (1, 7, 20):
        found = findings.fisher_table(n)
        for a, b in itertools.product(range(n + 1), repeat=2):
            assert found[a, b] == pytest.approx(fisher_exact([[a, n - a], [b, n - b]]).pvalue, rel=1e-9), (n, a, b)


def test_an_experiment_by_hand():
    found = findings.experiment(0.5, 0.5, 1)
    assert found == pytest.approx({"told apart": 0.0, "fewer": 0.25, "equal": 0.5, "more": 0.25})
    sure = findings.experiment(0.0, 1.0, 20)
    assert sure == pytest.approx({"told apart": 1.0, "fewer": 1.0, "equal": 0.0, "more": 0.0})


def test_the_retractions_numbers():
    assert findings.fisher_table(200)[1, 2] == pytest.approx(1.0) and findings.fisher_table(200)[1, 20] < 0.05
    assert findings.experiment(0.005, 0.01, 200)["told apart"] < 0.02


# --- the plan

BASE_SETTINGS = Settings(activations="float8", threshold=8)


def plan_of(design=Design(("row_threshold", "expert_order", "norm_blocks")), **changes):
    given = dict(
        design=design,
        base=BASE_SETTINGS,
        concurrency=8,
        concurrencies=(1, 8),
        requests=24,
        tokens=6,
        seeds=(0, 1),
        amplifiers=("activations as computed", "storage and logits in bfloat16"),
        carrier="norm_blocks",
        planted=(0.01, 2.0),
        cycle=6,
    )
    return Plan(**(given | changes))


def test_a_plans_cells_are_served_once_and_know_their_parts():
    cells = plan_of().cells()
    kinds = [part.split(":")[0] for parts in cells.values() for part in parts]
    assert (
        kinds.count("budget") == 16
        and kinds.count("load") == 4
        and kinds.count("planted") == 2
        and kinds.count("amplifiers") == 9
    )
    none = Cell(BASE_SETTINGS, 8, 24, 6, 0)
    assert cells[none] == ["budget", "load", f"amplifiers:{BASE}"]
    assert len(cells) == 16 + 2 + 2 + 6
    assert [cell.requests for cell in cells if cell.concurrency == 1] == [6, 6]  # each prompt once
    assert set(plan_of(parts=("planted",)).cells().values().__iter__().__next__()) == {"planted"}
    off = plan_of(parts=("load",), off_only=True).cells()
    assert [(cell.concurrency, cell.requests) for cell in off] == [(1, 24), (8, 24)] and not any(
        cell.settings.mechanisms.on for cell in off
    )


def test_without_a_scale_nothing_is_shared():
    design = Design(("batch_scale", "norm_blocks"))
    cells = plan_of(design, amplifiers=("activations as computed",), carrier="batch_scale").cells()
    unscaled = [
        cell.settings.mechanisms.on for cell, parts in cells.items() if "amplifiers:activations as computed" in parts
    ]
    assert unscaled == [(), ("norm_blocks",)]
    assert applicable(["batch_scale", "split_k", "expert_order"], "dense", "float16") == ("split_k", "batch_scale")
    assert applicable(["batch_scale", "split_k", "expert_order"], "moe", "as computed") == ("split_k", "expert_order")


@pytest.mark.parametrize(
    "change,name",
    [
        ({"amplifiers": ("loud",)}, "loud"),
        ({"parts": ("half",)}, "half"),
        ({"seeds": ()}, "seeds"),
        ({"seeds": (1, 1)}, "seeds"),
    ],
)
def test_wrong_plans_are_refused(change, name):
    with pytest.raises(BadInput, match=name):
        plan_of(**change)


# --- served by a tiny engine


@pytest.fixture(scope="module")
def subject(tiny_folder):
    return Subject.of(
        str(tiny_folder),
        "moe",
        6,
        4,
        "contiguous",
        prompts=["a", "what is it", "tell me more of this thing", "no", "why, and", "go on"],
    )


@pytest.fixture(scope="module")
def measured(subject):
    return measuring.measure(subject, plan_of(), processes=2, progress=False)


DESIGN = plan_of().design


def test_counts_are_the_requests(measured):
    budget_rows = measured.part("budget")
    assert budget_rows.requests.sum() == 16 * 24 and set(budget_rows.prompt) == set(range(6))
    assert (budget_rows.changed <= budget_rows.requests).all() and (
        measured.prompts.margins_moved <= measured.prompts.compared
    ).all()
    assert measured.part("load").groupby(["mechanisms", "concurrency"]).requests.sum().to_dict() == {
        ("none", 1): 6,
        ("none", 8): 24,
        ("row_threshold+expert_order+norm_blocks", 1): 6,
        ("row_threshold+expert_order+norm_blocks", 8): 24,
    }
    assert measured.prompts.solo_text.notna().all()
    # The text alone does not know of seeds, concurrency or planted noise.
    assert (
        measured.prompts.groupby(
            [*[c for c in ("mechanisms", "storage", "logits", "activations")], "prompt"]
        ).solo_text.nunique()
        == 1
    ).all()


def test_the_tables_say_what_was_served(measured):
    alone = study.alone_table(measured, DESIGN)
    assert (
        alone.occurred.all() and set(alone.mechanism) == set(DESIGN.mechanisms) and (alone["margins moved"] > 0).all()
    )
    loads = study.load_table(measured)
    assert (
        loads[loads.on == "none"].changed.sum() == 0
        and loads[(loads.on == "all") & (loads.concurrency == 8)].changed.sum() > 0
    )
    amplified = study.amplifier_table(measured)
    assert (
        set(amplified.amplifier) == {BASE, "activations as computed", "storage and logits in bfloat16"}
        and len(amplified) == 9
    )
    assert amplified[amplified.mechanisms == "none"].changed.sum() == 0
    base = amplified[amplified.amplifier == BASE]
    assert (base["texts alone unlike the base's"] == 0).all()
    planted = study.planted_table(measured)
    assert planted.planted.tolist() == [0.01, 2.0] and planted.changed.iloc[1] > planted.changed.iloc[0]


def test_verdicts_have_their_controls(measured):
    alone = study.alone_table(measured, DESIGN)
    seeds = findings.by_seed(measured, DESIGN)
    found = [
        *findings.load_verdicts(measured, DESIGN, "emulated"),
        findings.bits_verdict(measured, alone, DESIGN, "emulated"),
        findings.order_verdict(measured, DESIGN, seeds, "emulated"),
        findings.planted_verdict(measured, study.planted_table(measured), "emulated"),
        findings.retraction_verdict(findings.retold(measured, DESIGN), alone),
    ]
    verdicts = {one.id: one.verdict for one in (judge(**each) for each in found)}
    assert verdicts.pop("04.order-stable") in ("pass", "inconclusive")
    assert verdicts == {
        f"04.{name}": "pass"
        for name in ("all-off", "all-on-rises", "each-moves-bits", "planted-ranked", "one-against-two")
    }


def test_verdicts_can_fail(measured):
    """Positive controls of the verdicts themselves: faults put into the counts."""
    broken = measuring.Measured(measured.prompts.copy(), measured.choices, measured.steps)
    broken.prompts.loc[
        (broken.prompts.mechanisms == "none") & (broken.prompts.concurrency == 8) & (broken.prompts.planted == 0),
        ["changed", "margins_moved"],
    ] = 1
    assert judge(**findings.load_verdicts(broken, DESIGN, "emulated")[0]).verdict == "fail"
    planted = study.planted_table(measured)
    assert not findings.planted_verdict(measured, planted.iloc[::-1], "emulated")["holds"]
    seeds = findings.by_seed(measured, DESIGN)
    first = seeds.seed == 0
    turned = seeds.assign(share=np.where(first, -10 * seeds.share, seeds.share))
    pairs = clear_pairs(measured.part("budget"), DESIGN)
    assert findings.order_verdict(measured, DESIGN, turned, "emulated")["holds"] == (not pairs)
    silent = measuring.Measured(measured.prompts, measured.choices[measured.choices.concurrency == 0], measured.steps)
    assert not study.alone_table(silent, DESIGN).occurred.any()
    assert not findings.planted_verdict(silent, planted, "emulated")["occurred"]


def test_sentences_carry_their_numbers(measured):
    alone, shares = study.alone_table(measured, DESIGN), budget(measured.part("budget"), DESIGN)
    on = findings._worth(measured, "row_threshold+expert_order+norm_blocks")
    assert f"{on.events} of {on.trials}" in plain(findings.budget_sentence(measured, DESIGN, shares))
    loads = plain(findings.load_sentence(study.load_table(measured)))
    assert "0 of 30" in loads and "concurrency 1, 8" in loads
    quiet = alone.assign(changed=0)
    assert "changes no text in 48 requests" in plain(findings.alone_sentence(
        quiet
    )) and "row threshold" in plain(findings.alone_sentence(alone))
    told = plain(findings.retraction_sentence(findings.retold(measured, DESIGN)))
    assert "1 of 200 texts varying instead of 2 of 200 (p = 1.00)" in told
    assert "norm blocks alone changes" in plain(findings.amplifier_sentence(study.amplifier_table(measured), "norm_blocks"))
    assert plain(findings.amplifier_sentence(pd.DataFrame(), "x")) == "No amplifier was asked for."
    assert "0.01 changes" in plain(findings.planted_sentence(study.planted_table(measured), alone))
    assert "All off: 0 of 48" in plain(findings.conclusion(measured, DESIGN, alone, shares))
    assert "seed" in plain(findings.order_sentence(measured, DESIGN, findings.by_seed(measured, DESIGN)))
    words = study.describe_mechanisms(Design(tuple(Mechanisms.all().on)), 32)
    assert words.count("\n") == 8 and "4 segments of K up to 4" in words and "GEMM above" in words


def test_a_growing_share_is_said_to_rise_only_when_it_does():
    def loads(*rates):
        return pd.DataFrame(
            [
                {"on": "all", "concurrency": 2**i, "rate": r, "changed": int(100 * r), "requests": 100}
                for i, r in enumerate(rates)
            ]
        )

    assert "it rises at each step" in plain(findings.load_sentence(loads(0.0, 0.2, 0.3)))
    assert "does not rise at every step" in plain(findings.load_sentence(loads(0.0, 0.4, 0.3)))


def test_figures_show_every_mechanism(measured):
    alone, shares, label = study.alone_table(measured, DESIGN), budget(measured.part("budget"), DESIGN), "a model"
    names = {name.replace("_", " ") for name in DESIGN.mechanisms}
    figures = [
        plots.bits_and_texts(alone, label),
        plots.budget(shares, label),
        plots.by_seed(findings.by_seed(measured, DESIGN), label),
        plots.retold(findings.retold(measured, DESIGN), 200, label),
    ]
    for fig in figures:
        fig.draw_without_rendering()
        assert {text.get_text() for text in fig.axes[0].get_yticklabels()} == names
    fig = plots.planted(study.planted_table(measured), alone, label)
    said = " ".join(text.get_text() for text in fig.axes[0].texts)
    assert all(name in said for name in names)
    fig = plots.load(study.load_table(measured), label)
    assert [text.get_text() for text in fig.axes[0].get_xticklabels()] == ["1", "8"]
    fig = plots.amplifiers(study.amplifier_table(measured), label)
    assert len(fig.axes[0].get_yticklabels()) == 3


# --- recorded


def home(tmp_path, monkeypatch):
    (tmp_path / "notebooks").mkdir()
    monkeypatch.setenv("BATCH_VARIANCE_HOME", str(tmp_path))
    monkeypatch.setenv("BATCH_VARIANCE_COMMIT", "0123abc")
    return tmp_path / "data" / "recorded"


def test_counts_are_read_back_as_they_were_written(measured, subject, tmp_path, monkeypatch):
    folder = home(tmp_path, monkeypatch)
    assert (
        findings.recorded_runs() == []
        and "No GPU run" in plain(findings.recorded_sentence([]))
        and findings.recorded_off() == []
    )
    monkeypatch.setattr(measuring, "prefix_of", lambda ffn, tier: f"attribution_{ffn}")  # as a GPU would name them
    paths = measuring.save(subject, "a label", plan_of(), measured, folder)
    assert sorted(path.name for path in paths) == [
        "attribution_moe_choices.csv",
        "attribution_moe_prompts.csv",
        "attribution_moe_steps.csv",
    ]
    assert measuring.save(subject, "a label", plan_of(), measured, "") == []
    (run,) = findings.recorded_runs()
    assert run.design == DESIGN and run.label == "a label" and run.carrier == "norm_blocks" and run.requests == 384
    pd.testing.assert_frame_equal(run.shares, budget(measured.part("budget"), DESIGN))
    pd.testing.assert_frame_equal(run.alone, study.alone_table(measured, DESIGN), check_dtype=False)
    pd.testing.assert_frame_equal(run.amplified, study.amplifier_table(measured), check_dtype=False)
    pd.testing.assert_frame_equal(run.loads, study.load_table(measured), check_dtype=False)
    ids = [judge(**found).id for found in run.verdicts()]
    assert ids[0] == "04.h200-moe-all-off" and len(ids) == 5
    assert "384 requests" in plain(findings.recorded_sentence([run]))
    tier, source, off = findings.recorded_off()[0]
    assert (
        tier == "recorded-gpu"
        and "0123abc" in source
        and off.changed.sum() == 0
        and "0 of 30" in plain(findings.off_sentence(off))
    )


def test_a_part_replaces_its_own_rows(measured, subject, tmp_path, monkeypatch):
    folder = home(tmp_path, monkeypatch)
    save = partial(measuring.save, subject, "a label", folder=folder)
    only = lambda *parts: measuring.Measured(
        pd.concat([measured.part(part) for part in parts]), measured.choices, measured.steps
    )  # noqa: E731
    save(plan_of(parts=("budget", "planted")), only("budget", "planted"))
    save(plan_of(parts=("load",)), only("load"))
    halved = only("planted")
    halved.prompts["changed"] = 0
    save(plan_of(parts=("planted",)), halved)
    table = pd.read_csv(folder / "attribution_cpu_moe_prompts.csv")
    kinds = table.part.str.split(":").str[0].value_counts().to_dict()
    assert kinds == {name: len(measured.part(name)) for name in ("budget", "load", "planted")}
    assert (
        table[table.part == "planted"].changed.sum() == 0
        and table[table.part == "budget"].changed.sum() == measured.part("budget").changed.sum()
    )
    assert len(pd.read_csv(folder / "attribution_cpu_moe_choices.csv")) == len(measured.choices)
    assert not list(folder.glob(".*"))


def test_a_run_that_broke_off_is_analysed_by_its_ends(measured, subject):
    orders = Design(DESIGN.mechanisms, "orders", 3)
    stamped = measured.part("budget").assign(**measuring.stamp_of(subject, "", plan_of(orders)))
    assert measuring.design_of(stamped) in (orders, DESIGN) and measuring.design_of(stamped[:0]) is None
    missing = set(orders.coalitions()) - set(DESIGN.coalitions())
    assert measuring.design_of(stamped) == (DESIGN if missing else orders)
    assert measuring.design_of(stamped[stamped.mechanisms != "none"]) is None


def test_counts_are_told_cell_by_cell(subject):
    seen = []
    plan = plan_of(parts=("planted",), requests=6, tokens=2)
    measuring.measure(subject, plan, 2, lambda so_far: seen.append(so_far.prompts.requests.sum()), progress=False)
    assert seen == [6, 12]


# --- the command


def command(tiny_folder, folder, *more):
    return [
        str(folder),
        "--model",
        str(tiny_folder),
        "--device",
        "cpu",
        "--ffn",
        "dense",
        "--requests",
        "12",
        "--tokens",
        "3",
        "--prompts",
        "3",
        "--threshold",
        "8",
        "--concurrencies",
        "1",
        "4",
        "--processes",
        "2",
        *more,
    ]


def test_the_command_serves_all_off(tiny_folder, tmp_path, capsys):
    assert recording.main(command(tiny_folder, tmp_path, "--off")) == 0
    table = pd.read_csv(tmp_path / "attribution_cpu_dense_prompts.csv")
    assert table.groupby("concurrency").requests.sum().to_dict() == {1: 12, 4: 12} and table.changed.sum() == 0
    assert set(table.part) == {"load"} and "24 requests" in capsys.readouterr().out


def test_the_command_counts_steps_and_serves_nothing(tiny_folder, tmp_path, capsys):
    assert recording.main(command(tiny_folder, tmp_path, "--count", "--parts", "planted")) == 0
    assert "5 cells, 60 requests: about" in capsys.readouterr().out and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "wrong",
    [
        ["--mechanisms", "split"],
        ["--parts", "half"],
        ["--device", "tpu"],
        ["--prompts", "0"],
        ["--threshold", "-1"],
        ["--seeds", "1", "1"],
    ],
)
def test_the_command_refuses_bad_input(tiny_folder, tmp_path, capsys, wrong):
    assert recording.main(command(tiny_folder, tmp_path, *wrong)) == 2
    assert capsys.readouterr().err.startswith("attribution_recording: ") and not list(tmp_path.iterdir())


# --- parameters

GIVEN = dict(
    model="m",
    ffn="moe",
    experts=16,
    top_k=12,
    expert_split="clustered",
    threshold=32,
    mechanisms=["split_k", "norm_blocks"],
    design="ends",
    orders=1,
    storage="float32",
    logits="float32",
    activations="float16",
    concurrency=8,
    concurrencies=[1, 8],
    requests=10,
    prompts=4,
    tokens=4,
    seeds=[0, 1],
    amplifiers=list(AMPLIFIERS),
    carrier="split_k",
    planted=[0.1, 1.0],
    processes=0,
    device="cpu",
    record="",
)


def test_parameters_of_the_notebook():
    import nbformat

    from batch_variance.common.data import repository
    from batch_variance.reporting.parameters import read_parameters_file

    notebook = nbformat.read(repository() / "notebooks" / "04_attribution.ipynb", as_version=4)
    namespace = {}
    exec(next(cell.source for cell in notebook.cells if "parameters" in cell.metadata.get("tags", [])), namespace)
    p = study.Parameters.from_notebook(namespace)
    assert set(study.Parameters.model_fields) == {name for name in namespace if name != "__builtins__"}
    assert len(p.mechanisms) == 7
    _, given = read_parameters_file(repository() / "notebooks" / "gpu.yaml")
    mine = {name.removeprefix("04."): value for name, value in given.items() if name.startswith("04.")}
    recorded = study.Parameters.from_notebook(namespace | mine)
    assert recorded.requests >= 1000 and set(recorded.amplifiers) == set(study.AMPLIFIERS)
    for cell in notebook.cells:
        assert cell.cell_type != "code" or (len(cell.source.splitlines()) <= 26 and not cell.outputs)


@pytest.mark.parametrize(
    "change",
    [
        {"mechanisms": ["split_k"]},
        {"mechanisms": ["split_k", "split_k"]},
        {"mechanisms": ["split_k", "x"]},
        {"threshold": -1},
        {"design": "x"},
        {"orders": 0},
        {"storage": "float16"},
        {"concurrency": 1},
        {"concurrencies": []},
        {"concurrencies": [0, 8]},
        {"requests": 0},
        {"prompts": 65},
        {"tokens": 0},
        {"seeds": [0]},
        {"seeds": [1, 1]},
        {"amplifiers": ["x"]},
        {"carrier": "x"},
        {"planted": [0.1]},
        {"planted": [1.0, 0.1]},
        {"planted": [0.0, 1.0]},
        {"processes": -1},
        {"device": "tpu"},
        {"top_k": 17},
    ],
)
def test_wrong_parameters_are_refused_by_name(change):
    with pytest.raises(BadInput, match=next(iter(change))):
        study.Parameters.checked(GIVEN | change)
    study.Parameters.checked(GIVEN)


def test_mechanisms_that_cannot_act_are_left_out_or_refused():
    with pytest.raises(BadInput, match="fewer than two can act"):
        study.Parameters.checked(GIVEN | {"ffn": "dense", "mechanisms": ["split_k", "expert_order"]})


def selections(chosen: int, all_taken: int) -> pd.DataFrame:
    """A table as `selection_table` gives it: two small mechanisms, the row threshold and none."""
    rows = []
    for ffn, changed in zip(findings.SELECTIONS.values(), (0, all_taken, chosen)):
        for name, count, moved in (("none", 0, 0.0), ("row_threshold", 60, 1.0), ("norm_blocks", changed, 0.9)):
            low, high = exact_interval(count, 1000)
            rows.append((ffn, name, 1000, count, low, high, moved, moved / 50, "a label"))
    names = ["ffn", "mechanisms", "requests", "changed", "low", "high", "margins moved", "largest move", "label"]
    return pd.DataFrame(rows, columns=names)


@pytest.mark.parametrize("chosen,all_taken,verdict", [(90, 0, "pass"), (90, 80, "fail"), (0, 0, "fail")])
def test_the_choice_of_experts_is_judged_by_what_taking_all_does(chosen, all_taken, verdict):
    table = selections(chosen, all_taken)
    assert judge(**findings.selection_verdict(table)).verdict == verdict
    said = findings.selection_sentence(table)
    assert f"some chosen {chosen} of 1000" in said and f"all taken {all_taken} of 1000" in said
    table.loc[table.mechanisms == "none", "changed"] = 1
    assert judge(**findings.selection_verdict(table)).verdict == "inconclusive"


def test_the_choice_of_experts_needs_all_three_runs(measured, subject, tmp_path, monkeypatch):
    folder = home(tmp_path, monkeypatch)
    monkeypatch.setattr(measuring, "prefix_of", lambda kind, tier: f"attribution_{kind}")  # as a GPU would name them
    measuring.save(subject, "some", plan_of(), measured, folder)
    assert findings.selection_table().empty and "not recorded" in findings.selection_sentence(pd.DataFrame())
    measuring.save(replace(subject, top_k=subject.experts), "all", plan_of(), measured, folder)
    measuring.save(replace(subject, ffn="dense"), "dense", plan_of(), measured, folder)
    table = findings.selection_table()
    assert list(dict.fromkeys(table.ffn)) == list(findings.SELECTIONS.values())
    assert list(dict.fromkeys(table.label)) == ["dense", "all", "some"] and (table.requests > 0).all()
    assert {text.get_text() for text in plots.selection(table).axes[0].get_yticklabels()}
