"""Notebook 01's study on a tiny model: what it refuses, what it counts, and that its controls and verdicts can fail."""

import ast
import json
import os
import subprocess
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

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
from batch_variance.common.provenance import GPU_COLUMNS  # noqa: E402
from batch_variance.kernels.sets import EmulatedKernels  # noqa: E402
from batch_variance.reporting.checks import judge  # noqa: E402
from batch_variance.reporting.parameters import read_defaults, read_settings  # noqa: E402
from batch_variance.reporting.plots import row_threshold as plots  # noqa: E402
from batch_variance.studies import row_threshold as study  # noqa: E402
from batch_variance.studies import row_threshold_findings as findings  # noqa: E402
from batch_variance.studies.sources import plain

NOTEBOOK = "01_row_threshold"
POLICIES = ["default", "force-gemv", "force-gemm"]
PROMPTS = ["Why?", "What is a batch of rows?", "Name three colours, please.", "x"]
THRESHOLD = 8
VARIANT_COUNTS = ["requests", "prompts", "prompts with more than one output", "most variants", "differ from alone"]


@pytest.fixture(scope="module")
def prompts_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("prompts") / "prompts.json"
    path.write_text(json.dumps(PROMPTS))
    return path


@pytest.fixture(scope="module")
def values(tiny_folder, prompts_file):
    """Parameters that fit the tiny model."""
    return dict(
        model=str(tiny_folder), ffn="moe", experts=2, top_k=1, expert_split="contiguous", threshold=THRESHOLD,
        policies=POLICIES, concurrencies=[1, 4], cycles=1, tokens=6, native_tokens=4, perplexity_tokens=32,
        prompts=str(prompts_file), seed=0, device="cpu", record="",
    )  # fmt: skip


@pytest.fixture(scope="module")
def setup(values):
    return study.prepare(study.Parameters.checked(values))


@pytest.fixture(scope="module")
def served(setup):
    return study.serve_policies(setup)


@pytest.fixture(scope="module")
def parts(setup):
    return study.decompose(setup)


# --- Parameters -------------------------------------------------------------------------------------------------------


def test_parameters_are_the_notebook_s_and_its_values_are_good():
    folder = repository() / "notebooks"
    notebook = nbformat.read(folder / f"{NOTEBOOK}.ipynb", 4)
    cell = next(c for c in notebook.cells if "parameters" in c.metadata.get("tags", []))
    named = [line.targets[0].id for line in ast.parse(cell.source).body]
    assert named == list(study.Parameters.model_fields)
    assert all("  # " in line for line in cell.source.splitlines())
    assert all(not c.get("outputs") for c in notebook.cells)
    defaults = read_defaults(folder / f"{NOTEBOOK}.ipynb")
    assert study.Parameters.checked(defaults).threshold == 32
    quick = study.Parameters.checked(defaults | read_settings(folder)[NOTEBOOK]["quick"])
    assert quick.tokens < defaults["tokens"]


@pytest.mark.parametrize(
    "change, words",
    [
        (dict(concurrencies=[1, 0]), "concurrencies = [1, 0]: give different whole numbers from 1"),
        (dict(concurrencies=[8, 32]), "concurrencies = [8, 32]: give different whole numbers from 1"),
        (dict(concurrencies=[1, 8, 8]), "concurrencies = [1, 8, 8]: give different"),
        (dict(concurrencies=[1]), "at least one above it"),
        (dict(concurrencies=[]), "concurrencies = []: give different"),
        (dict(threshold=-1), "threshold = -1: threshold -1 is negative"),
        (dict(policies=["default", "force-gemv", "fastest"]), "policy 'fastest' is unknown: give one of default"),
        (dict(policies=["force-gemv", "force-gemm"]), "default and force-gemv must both be among them"),
        (dict(policies=["default", "force-gemv", "default"]), "a policy is named twice"),
        (dict(tokens=0), "tokens = 0 cannot be used"),
        (dict(native_tokens=0), "native_tokens = 0 cannot be used"),
        (dict(perplexity_tokens=1), "perplexity_tokens = 1 cannot be used"),
        (dict(cycles=0), "cycles = 0 cannot be used"),
        (dict(seed=-1), "seed = -1 cannot be used"),
        (dict(experts=1), "experts = 1 cannot be used"),
        (dict(top_k=0), "top_k = 0 cannot be used"),
        (dict(top_k=3), "top_k = 3 does not fit 2 experts: give 1 ... 2."),
        (dict(ffn="sparse"), "ffn = 'sparse' cannot be used"),
        (dict(expert_split="random"), "expert_split = 'random' cannot be used"),
        (dict(device="tpu"), "device 'tpu' is unknown: give auto, cpu or cuda."),
        (dict(rows=3), "rows = 3 cannot be used"),
    ],
)
def test_a_bad_parameter_is_one_sentence(values, change, words):
    with pytest.raises(BadInput) as caught:
        study.Parameters.checked(values | change)
    assert words in str(caught.value)
    assert str(caught.value).endswith(".") and "\n" not in str(caught.value)


def test_what_only_experts_need_is_not_asked_of_a_dense_model(values):
    assert study.Parameters.checked(values | dict(ffn="dense", top_k=3)).top_k == 3


def test_cuda_without_a_gpu_is_refused(values, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(BadInput, match="^device = 'cuda': .*no usable GPU here: give cpu or auto.$"):
        study.Parameters.checked(values | dict(device="cuda"))


@pytest.mark.parametrize(
    "content, words",
    [
        (None, "there is no file"),
        (b"", "is not JSON"),
        (b"Why?\nHow?\n", "is not JSON"),
        (b"\xff\xfe\x00[", "is not JSON"),
        (b"[]", "holds no list of texts"),
        (b"{}", "holds no list of texts"),
        (b'"Why?"', "holds no list of texts"),
        (b'["Why?", " \\n"]', "none of them blank"),
        (b'["Why?", 3]', "holds no list of texts"),
    ],
)
def test_a_prompts_file_that_cannot_be_used(values, tmp_path, content, words):
    path = tmp_path / "prompts.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(BadInput) as caught:
        study.Parameters.checked(values | dict(prompts=str(path)))
    assert words in str(caught.value) and str(path) in str(caught.value)


@pytest.mark.parametrize("place", [".", "x" * 300])
def test_prompts_that_are_no_file_at_all(values, tmp_path, place):
    with pytest.raises(BadInput, match="cannot be read"):
        study.Parameters.checked(values | dict(prompts=str(tmp_path / place)))


def test_prompts_are_read_as_they_are(values, tmp_path):
    (tmp_path / "p.json").write_text('["Où ?", "  two  "]', encoding="utf-8")
    assert study.read_prompts(str(tmp_path / "p.json")) == ["Où ?", "  two  "]
    assert len(study.read_prompts("")) == len(json.loads((repository() / "data" / "prompts.json").read_text())) > 1


def test_sizes_that_do_not_fit_the_model_are_refused_when_it_is_known(values):
    with pytest.raises(BadInput, match="experts = 16 does not cut 96 neurons"):
        study.prepare(study.Parameters.checked(values | dict(experts=16)))


COMMAND_LINES = {
    "an unknown parameter": (["-p", "treshold=3"], "parameter 'treshold' is unknown: notebook 01_row_threshold has"),
    "concurrency 0": (["-p", "concurrencies=[0]"], "concurrencies = [0]: give different whole numbers from 1"),
    "prompts missing": (["-p", "prompts=nowhere.json"], "there is no file nowhere.json"),
    "prompts empty": (["-p", "prompts=empty.json"], "empty.json is not JSON"),
    "a negative threshold": (["-p", "01.threshold=-1"], "threshold -1 is negative"),
    "cuda without a GPU": (["--device", "cuda"], "torch finds no usable GPU here"),
    "nowhere to write": (["--out", "empty.json/report"], "the report cannot be written to"),
}


@pytest.fixture(scope="module")
def refusals(tmp_path_factory):
    """Each command line run for real, in a folder that holds one empty file: (process, what the folder held after)."""

    def run(arguments):
        home = tmp_path_factory.mktemp("shell")
        (home / "empty.json").touch()
        command = [sys.executable, "-m", "batch_variance", "report", "--only", "01", *arguments]
        done = subprocess.run(
            command, cwd=home, capture_output=True, text=True, timeout=120, stdin=subprocess.DEVNULL,
            env=os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        return done, sorted(path.relative_to(home).as_posix() for path in home.rglob("*"))

    # Each run spends its seconds on imports: two at a time on two cores.
    with ThreadPoolExecutor(2) as pool:
        return dict(zip(COMMAND_LINES, pool.map(run, [arguments for arguments, _ in COMMAND_LINES.values()])))


@pytest.mark.parametrize("case", COMMAND_LINES)
def test_the_command_line_refuses_with_one_line_and_writes_nothing(refusals, case):
    done, left = refusals[case]
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1 and done.stdout == ""
    assert COMMAND_LINES[case][1] in done.stderr
    assert left == ["empty.json"]


# --- Counting, on frames worked out by hand ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "a, b, index",
    [
        ([], [], -1), ([1, 2], [1, 2], -1), ([1, 2], [3, 2], 0), ([1, 2, 3], [1, 2, 4], 2),
        ([1, 2], [1, 2, 3], 2), ([1, 2, 3], [1, 2], 2), ([], [1], 0),
    ],
)  # fmt: skip
def test_first_divergence(a, b, index):
    assert study.first_divergence(a, b) == index


def request_rows(policy, concurrency, run, prompts, kinds, divergences, tokens):
    return [
        {
            "policy": policy, "concurrency": concurrency, "run": run, "request": i, "prompt": p, "variant": k,
            "first_divergence": d, "co_resident_rows": 2.0 + i, "smallest_margin": 0.5, "tokens": t,
        }
        for i, (p, k, d, t) in enumerate(zip(prompts, kinds, divergences, tokens))
    ]  # fmt: skip


@pytest.fixture
def requests():
    """Two prompts at concurrency 1 and 4: in run A of 4, request 2 gets another text than request 0."""
    quiet = dict(prompts=[0, 1], kinds=[0, 0], divergences=[-1, -1], tokens=["5 6", "7 8"])
    return pd.DataFrame(
        request_rows("default", 1, "A", **quiet)
        + request_rows("default", 1, "B", **quiet)
        + request_rows("default", 4, "A", [0, 1, 0, 1], [0, 0, 1, 0], [-1, -1, 1, -1], ["5 6", "7 8", "5 9", "7 8"])
        + request_rows("default", 4, "B", [0, 1, 0, 1], [0, 0, 0, 1], [0, -1, 0, 1], ["4 6", "7 8", "4 6", "7 9"])
    )


def test_variants_counts_prompts_and_requests(requests):
    table = study.variants(requests)
    assert table[["policy", "concurrency", "run"]].to_numpy().tolist() == [
        ["default", 1, "A"], ["default", 1, "B"], ["default", 4, "A"], ["default", 4, "B"],
    ]  # fmt: skip
    # In the last row, prompt 0 has one output twice, but not the one it has alone.
    assert table[VARIANT_COUNTS].to_numpy().tolist() == [
        [2, 2, 0, 1, 0], [2, 2, 0, 1, 0], [4, 2, 1, 2, 1], [4, 2, 1, 2, 3],
    ]  # fmt: skip
    assert table["co-resident rows"].tolist() == [2.5, 2.5, 3.5, 3.5]
    # Clopper-Pearson in closed form: 0 of 2 ends at 1 - 0.025^(1/2), 1 of 4 starts at 1 - 0.975^(1/4).
    assert table.low[0] == 0 and table.high[0] == pytest.approx(1 - 0.025**0.5)
    assert table.low[2] == pytest.approx(1 - 0.975**0.25)
    high = table.high[2]
    assert (1 - high) ** 4 + 4 * high * (1 - high) ** 3 == pytest.approx(0.025)
    assert study.total_variants(table, "default") == (2, 4, 8)
    assert study.total_variants(table, "force-gemv") == (0, 0, 0)


def test_pairs_compares_request_by_request(requests):
    table = study.pairs(requests.sample(frac=1, random_state=1).sort_values("concurrency", kind="stable"))
    assert table[["concurrency", "requests", "differ between A and B"]].to_numpy().tolist() == [[1, 2, 0], [4, 4, 3]]
    assert table.high[0] == pytest.approx(1 - 0.025**0.5)


def matmul_frame(policy="default", concurrency=4):
    below = [(3, 3, "gemv", 10), (4, 1, "gemv", 5)]
    cells = below + [(5, 0, "gemm", 7), (9, 2, "gemm", 2), (6, 6, "gemm", 1), (5, 4, "gemm", 3)]
    return pd.DataFrame(
        [{"policy": policy, "concurrency": concurrency, "run": "A", "rows": r, "decode_rows": d, "kernel": k, "ffns": n}
         for r, d, k, n in cells]
    )  # fmt: skip


def test_crossings_say_how_the_rows_got_there():
    (row,) = study.crossings(matmul_frame(), 4).to_dict("records")
    # Four rows at a threshold of four have not crossed; (5, 4) crossed by one prefill row that joined four decode rows.
    assert row == {
        "policy": "default", "concurrency": 4, "FFNs": 28, "over the threshold": 13, "by decode rows alone": 1,
        "through prefill": 12, "of these with decode rows": 5, "kernels": "gemm, gemv",
    }  # fmt: skip
    assert study.crossings(matmul_frame(), 9).iloc[0, 3:7].tolist() == [0] * 4
    assert study.crossings(matmul_frame(), 0).iloc[0]["over the threshold"] == 28
    said = plain(findings.crossing_sentence(study.crossings(matmul_frame(), 4)))
    assert "at concurrency 4, 13 of 28 FFNs (46.4%)" in said and "12 through prefill and 1 by decode rows alone" in said


def test_solo_texts_differ_looks_at_prompts_alone(requests):
    assert findings.solo_texts_differ(requests) is False
    other = requests[(requests.concurrency == 1)].assign(policy="force-gemm")
    assert findings.solo_texts_differ(pd.concat([requests, other])) is False
    other.loc[other.prompt == 1, "tokens"] = "7 9"
    assert findings.solo_texts_differ(pd.concat([requests, other])) is True


# --- Verdicts ---------------------------------------------------------------------------------------------------------


def hand_tables(default=3, gemv=0, gemm=0, alone=0, apart=2, over=9):
    """variants, pairs and crossings of three policies at concurrency 1 and 4, with so many requests changed."""
    changed = {"default": default, "force-gemv": gemv, "force-gemm": gemm}
    variants = [
        {"policy": name, "concurrency": c, "run": run, "requests": 10, "prompts": 5,
         "prompts with more than one output": int(count > 0 and c > 1), "most variants": 1 + int(count > 0 and c > 1),
         "differ from alone": count if c > 1 and run == "A" else 0, "low": 0.0, "high": 1.0,
         "co-resident rows": 2.0 * c}
        for name, count in changed.items() for c in (1, 4) for run in "AB"
    ]  # fmt: skip
    pairs = [
        {"policy": name, "concurrency": c, "requests": 10, "low": 0.0, "high": 1.0,
         "differ between A and B": (apart if name == "default" else 0) if c > 1 else alone}
        for name in changed for c in (1, 4)
    ]  # fmt: skip
    crossed = [
        {"policy": name, "concurrency": c, "FFNs": 20, "over the threshold": over, "by decode rows alone": 0,
         "through prefill": over, "of these with decode rows": 0, "kernels": "gemm, gemv"}
        for name in changed for c in (1, 4)
    ]  # fmt: skip
    return pd.DataFrame(variants), pd.DataFrame(pairs), pd.DataFrame(crossed)


def verdicts(solo=True, invariant=True, caught=True, **counts):
    found = findings.policy_verdicts(*hand_tables(**counts), solo, invariant, caught)
    judged = [judge(tier="emulated", **one) for one in found]
    return {one.id.removeprefix("01.paths-"): one for one in judged}


def words(**case):
    return {name: one.verdict for name, one in verdicts(**case).items()}


def open_verdicts(*names):
    return dict.fromkeys(names, "inconclusive")


ALL_PASS = {"force-gemv": "pass", "force-gemm": "pass", "default": "pass", "alone-twice": "pass"}


def test_verdicts_pass_with_their_counts():
    found = verdicts()
    assert {name: one.verdict for name, one in found.items()} == ALL_PASS
    assert (found["default"].value, found["default"].n) == (3, 20)
    assert (found["force-gemv"].value, found["force-gemv"].n, found["alone-twice"].n) == (0, 20, 30)
    assert found["force-gemv"].interval == [0.0, pytest.approx(1 - 0.025 ** (1 / 20))]


@pytest.mark.parametrize(
    "case, changed",
    [
        # A variant under a forced path refutes it, and takes the default's negative control away.
        (dict(gemv=1), {"force-gemv": "fail", "default": "inconclusive"}),
        (dict(gemm=2), {"force-gemm": "fail", "default": "inconclusive"}),
        (dict(alone=1), {"alone-twice": "fail"}),
        # No positive control: nothing changed under the default dispatch either.
        (dict(default=0), open_verdicts("force-gemv", "force-gemm") | {"default": "fail"}),
        (dict(default=0, solo=False), open_verdicts("force-gemv", "force-gemm", "default")),
        (dict(apart=0), open_verdicts("alone-twice")),
        (dict(caught=False), open_verdicts("force-gemv", "force-gemm", "default")),
        # No negative control: a base operation saw the batch.
        (dict(invariant=False), open_verdicts("force-gemv", "force-gemm", "alone-twice")),
        # It did not occur: the threshold was never crossed, or always.
        (dict(over=0), open_verdicts("force-gemv", "force-gemm", "default")),
        (dict(over=20), open_verdicts("default")),
        # A missing control outweighs a refutation.
        (dict(gemv=1, caught=False), open_verdicts("force-gemv", "force-gemm", "default")),
    ],
)
def test_verdicts_fail_or_stay_inconclusive(case, changed):
    assert words(**case) == ALL_PASS | changed


def test_crossings_at_concurrency_1_prove_nothing():
    variants, pairs, crossed = hand_tables()
    crossed.loc[crossed.concurrency > 1, "over the threshold"] = 0
    found = findings.policy_verdicts(variants, pairs, crossed, True, True, True)
    assert [one["occurred"] for one in found] == [False, False, False, True]


def test_prompts_that_never_had_company_prove_nothing():
    variants, pairs, crossed = hand_tables()
    variants["co-resident rows"] = 2.0
    assert findings.policy_verdicts(variants, pairs, crossed, True, True, True)[-1]["occurred"] is False


def native_frame(on=2, off=0, moved_off=0, rerun=True):
    rows = []
    conditions = (("float32", "on", 1, 3), ("bfloat16", "on", on, 2), ("bfloat16", "off", off, moved_off))
    for dtype, onednn, changed, moved in conditions:
        rows += [
            {"dtype": dtype, "onednn": onednn, "prompt": i, "text_changed": i < changed, "first_divergence": -1,
             "tokens": 4, "margins_changed": moved, "exact_ties": 1, "rerun_same": rerun}
            for i in range(4)
        ]  # fmt: skip
    return pd.DataFrame(rows)


def test_native_summary_and_sentence():
    summary = study.native_summary(native_frame())
    counts = ["dtype", "oneDNN", "texts", "texts changed", "tokens compared", "margins moved", "exact ties"]
    assert summary[counts].to_numpy().tolist() == [
        ["float32", "on", 4, 1, 16, 12, 4], ["bfloat16", "on", 4, 2, 16, 8, 4], ["bfloat16", "off", 4, 0, 16, 0, 4],
    ]  # fmt: skip
    said = plain(findings.native_sentence(summary))
    assert "2 of 4 bfloat16 texts and 1 of 4 float32 texts changed, while 50% and 75%" in said
    assert "With oneDNN off, 0 of 4 bfloat16 texts changed and 0% of the margins moved" in said


@pytest.mark.parametrize(
    "case, verdict",
    [
        ({}, "pass"), (dict(off=1), "fail"), (dict(moved_off=1), "fail"), (dict(on=0), "inconclusive"),
        (dict(rerun=False), "inconclusive"), (dict(off=1, rerun=False), "inconclusive"),
    ],
)  # fmt: skip
def test_native_verdict(case, verdict):
    found = findings.native_verdict(study.native_summary(native_frame(**case)))
    assert judge(id="01.native-onednn", claim="c", tier="cpu-native", **found).verdict == verdict


# --- The study on the tiny model --------------------------------------------------------------------------------------


class SplitByRows(EmulatedKernels):
    """A matmul that cuts K in two from a number of rows on."""

    def __init__(self, admits):
        self.admits = admits

    def linear(self, x, weight):
        if not self.admits(x.shape[0]):
            return super().linear(x, weight)
        half = x.shape[1] // 2
        return super().linear(x[:, :half], weight[:, :half]) + super().linear(x[:, half:], weight[:, half:])


class RolledAbove(EmulatedKernels):
    """A matmul so wrong above four rows that every text shows it."""

    def linear(self, x, weight):
        y = super().linear(x, weight)
        return y.roll(1, -1) if x.shape[0] > 4 else y


PLAIN_MATMULS = ["qkv", "attention output", "logits", "router"]


def test_base_operations_are_invariant_but_for_the_planted_fault(setup):
    found = study.base_operations(setup).set_index("operation")
    assert set(found["rows compared"]) == {1 + 2 + 15 + 16 + 17 + 31 + 32 + 33 + 64 + 65}
    assert found.index[found["rows that differ"] > 0].tolist() == ["planted fault"]
    assert found.index[found.planted].tolist() == ["planted fault"]
    assert set(PLAIN_MATMULS) | {"gate and up, gemv", "down, gemm", "RMSNorm", "attention"} < set(found.index)
    assert found.loc["qkv", "shape"] == "128 x 64"


@pytest.mark.parametrize("admits, most", [(lambda m: m > 15, 258), (lambda m: m == 17, 17)])
def test_base_operations_find_a_fault_in_the_kernels(setup, admits, most):
    control = study.base_operations(replace(setup, kernels=SplitByRows(admits)))
    found = control.set_index("operation")["rows that differ"]
    assert (found[PLAIN_MATMULS] > 0).all() and (found[PLAIN_MATMULS] <= most).all()
    assert (found.drop([*PLAIN_MATMULS, "planted fault"]) == 0).all()


def test_decompose_switches_one_factor_at_a_time(parts):
    step = parts.set_index("step")
    nothing = step.loc["GEMV, run again"]
    exact_zeros = ["other_bits", "median_ulp", "median_row_scaled_ulp", "largest_row_scaled_ulp", "relative_difference"]
    assert (nothing[exact_zeros] == 0).all() and 0 < nothing.relative_error < 1e-6
    alone = step.loc[[f"only {name}" for name in study.FACTORS]]
    assert (alone.relative_difference > 0).all() and (alone.other_bits > 0).all()
    # bfloat16 keeps 8 significant bits: rounding an operand is felt at 1e-3, another order of additions at 1e-7.
    assert (alone.relative_difference.iloc[:2] > 1e-4).all() and alone.relative_difference.iloc[2] < 1e-6
    whole = step.loc["GEMM (all three)"].relative_difference
    squares = float(np.sqrt((alone.relative_difference**2).sum()))
    assert whole == pytest.approx(squares, rel=0.1)
    without = step.loc["all but activation rounding"].relative_difference
    assert without == pytest.approx(step.loc["only weight rounding"].relative_difference, rel=0.01)
    assert set(parts["values"]) == {sum(map(len, PROMPT_TOKENS)) * 96}


# The tokenizer has a token a byte; the template puts <|im_start|> and <|im_end|> around, an empty system message first.
PROMPT_TOKENS = [["<s>", "</s>", "<s>", *text.encode(), "</s>", "<s>"] for text in PROMPTS]


def test_prompts_go_through_the_template(setup):
    assert [len(prompt) for prompt in setup.prompts] == [len(tokens) for tokens in PROMPT_TOKENS]
    assert setup.tier == "emulated" and "2 experts, top 1" in setup.weights.label
    assert "4 prompts of 6 to 32 tokens" in plain(findings.describe(setup))


def test_with_exact_weights_only_the_order_of_additions_is_left(setup, parts):
    agreement = study.path_agreement(setup)
    apart = agreement.set_index("policy").relative_difference
    assert apart.index.tolist() == ["default", "round-activations", "round-activations-exact-weights"]
    assert 1e-4 < apart["round-activations"] < apart["default"]
    assert 0 < apart["round-activations-exact-weights"] < 1e-6
    found = findings.agreement_verdict(agreement, parts)
    assert judge(tier="emulated", **found).verdict == "pass"
    agreement.loc[agreement.policy == "round-activations", "other_bits"] = 0.0
    assert judge(tier="emulated", **findings.agreement_verdict(agreement, parts)).verdict == "fail"
    unmoved = parts.assign(other_bits=parts.other_bits.where(parts.step != "only activation rounding", 0.0))
    assert judge(tier="emulated", **findings.agreement_verdict(agreement, unmoved)).verdict == "inconclusive"


def test_one_forced_path_gives_each_prompt_its_own_text_and_bits(served):
    table = study.variants(served.requests)
    forced = table[table.policy != "default"]
    assert (forced["differ from alone"] == 0).all() and (forced["most variants"] == 1).all()
    margins = served.requests.groupby(["policy", "prompt"]).smallest_margin.nunique().unstack(0)
    assert (margins[["force-gemv", "force-gemm"]] == 1).all(axis=None)
    # The positive control: the same batches under the default dispatch move some margin's bits.
    assert (margins["default"] > 1).any()
    crossed = study.crossings(served.matmuls, THRESHOLD).set_index(["policy", "concurrency"])
    over = crossed.loc["force-gemv", 4]
    assert 0 < over["over the threshold"] < over.FFNs and over.kernels == "gemv"
    assert crossed.loc[("default", 4), "kernels"] == "gemm, gemv"
    assert crossed.loc[("force-gemm", 4), "kernels"] == "gemm"


def test_the_kernel_follows_the_row_count(served):
    default = served.matmuls[served.matmuls.policy == "default"]
    assert set(default.kernel[default.rows <= THRESHOLD]) == {"gemv"}
    assert set(default.kernel[default.rows > THRESHOLD]) == {"gemm"}


def test_runs_differ_in_their_trace_and_repeat_exactly(setup, served):
    again = study.serve_policies(setup)
    first, second = (results.requests for results in (served, again))
    pd.testing.assert_frame_equal(first, second)
    pd.testing.assert_frame_equal(again.matmuls, served.matmuls)

    def trace(concurrency, run):
        m = served.matmuls
        part = m[(m.policy == "default") & (m.concurrency == concurrency) & (m.run == run)]
        return part[["rows", "decode_rows", "kernel", "ffns"]].to_numpy().tolist()

    assert trace(4, "A") != trace(4, "B")
    assert trace(1, "A") == trace(1, "B")


def test_a_batch_that_changes_texts_is_counted(setup):
    p = setup.p.model_copy(update=dict(policies=["force-gemv"]))
    results = study.serve_policies(replace(setup, p=p, kernels=RolledAbove()))
    table = study.variants(results.requests).set_index(["concurrency", "run"])["differ from alone"]
    assert table[1, "A"] == table[1, "B"] == 0 and table[4, "A"] > 0


def test_every_prompt_is_asked_and_cycles_add_requests(setup, served):
    counts = served.requests.groupby(["policy", "concurrency", "run"]).size()
    assert set(counts) == {len(PROMPTS)}
    p = setup.p.model_copy(update=dict(policies=["force-gemv"], cycles=2, tokens=1))
    sizes = study.serve_policies(replace(setup, p=p)).requests.groupby(["concurrency", "run"]).size()
    assert sizes.to_dict() == {(1, "A"): 4, (1, "B"): 4, (4, "A"): 8, (4, "B"): 8}


def test_native_texts_leave_onednn_as_it_was_and_warn_of_nothing(setup):
    if not torch.backends.mkldnn.is_available():
        pytest.skip("this torch has no oneDNN")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = study.native_texts(setup)
    assert torch.backends.mkldnn.enabled
    assert found.groupby(["dtype", "onednn"]).size().to_dict() == {
        ("float32", "on"): 4, ("bfloat16", "on"): 4, ("bfloat16", "off"): 4,
    }  # fmt: skip
    assert found.rerun_same.all() and (found.margins_changed <= found.tokens).all()
    assert (found.tokens[~found.text_changed] == setup.p.native_tokens).all()
    assert (found.first_divergence[found.text_changed] == found.tokens[found.text_changed]).all()


def test_a_dense_model_has_one_ffn_a_layer(values):
    dense = study.prepare(study.Parameters.checked(values | dict(ffn="dense")))
    control = study.base_operations(dense).set_index("operation")
    assert "router" not in control.index and control.loc["gate and up, gemv", "shape"] == "192 x 64"
    assert control.index[control["rows that differ"] > 0].tolist() == ["planted fault"]
    assert "dense" in dense.weights.label and set(dense.ffn_inputs) == {1}


# --- What is written, and read back -----------------------------------------------------------------------------------


@pytest.fixture
def tables(setup, served, parts):
    variants, pairs = study.variants(served.requests), study.pairs(served.requests)
    return {
        "variants": variants.assign(solo_texts_differ=True), "pairs": pairs,
        "crossings": study.crossings(served.matmuls, THRESHOLD), "decomposition": findings.step_summary(parts),
        "agreement": findings.agreement_summary(study.path_agreement(setup)), "control": study.base_operations(setup),
        "quality": study.quality(setup),
    }  # fmt: skip


def test_tables_are_written_whole_and_read_back(setup, tables, tmp_path, monkeypatch):
    (tmp_path / "notebooks").mkdir()
    monkeypatch.setenv("BATCH_VARIANCE_HOME", str(tmp_path))
    monkeypatch.setenv("BATCH_VARIANCE_COMMIT", "0123abc")
    folder = tmp_path / "data" / "recorded"
    assert findings.recorded_tables("moe") is None and study.recorded("pairs", "moe").empty
    written = study.save(setup, tables, folder)
    assert sorted(folder.iterdir()) == sorted(written)
    assert {path.name for path in written} == {f"row_threshold_moe_{name}.csv" for name in study.RECORDED_TABLES}
    found = findings.recorded_tables("moe")
    for name, frame in tables.items():
        columns = list(frame.columns)
        assert list(found[name].columns) == [*columns, "ffn", "model", "label", "threshold", *GPU_COLUMNS]
        # Shown as text such as 1.41e-07, read back as a number: the text of both is what a reader sees.
        texts = {c: found[name][c].map("{:.2e}".format) for c in columns if c.startswith("relative ")}
        pd.testing.assert_frame_equal(found[name][columns].assign(**texts), frame, check_dtype=False)
        assert set(found[name].commit.astype(str)) == {"0123abc"} and set(found[name].threshold) == {THRESHOLD}
        assert not found[name].isna().any(axis=None)
        left = [column for column in columns if column != "solo_texts_differ"]
        assert list(study.unstamped(found[name]).columns) == left
    assert findings.recorded_tables("dense") is None
    said = study.recorded_source(found["variants"])
    assert "commit 0123abc" in said and setup.weights.label in said
    frames = (tables[name] for name in ("variants", "pairs", "crossings"))
    live = findings.policy_verdicts(*frames, True, True, True, "01.h200-moe")
    assert findings.recorded_verdicts("moe", found) == live
    (folder / "row_threshold_moe_quality.csv").unlink()
    assert findings.recorded_tables("moe") is None


def test_nothing_is_written_without_a_folder_or_where_none_can_be(setup, tables, tmp_path):
    assert study.save(setup, tables, "") == []
    (tmp_path / "file").touch()
    with pytest.raises(BadInput, match="cannot be written"):
        study.save(setup, tables, tmp_path / "file" / "below")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_recorded_control_that_failed_shows_in_the_verdicts(setup, tables):
    control = tables["control"].copy()
    control.loc[control.operation == "qkv", "rows that differ"] = 1
    found = findings.recorded_verdicts("moe", tables | {"control": control})
    assert not found[0]["negative_control"] and found[0]["id"] == "01.h200-moe-force-gemv"


def test_quality_measures_the_dense_model_and_the_one_under_study(setup):
    found = study.quality(setup)
    assert found.weights.tolist() == ["dense, float32", setup.weights.label]
    assert (found.perplexity > 1).all() and np.isfinite(found.perplexity).all() and set(found.tokens) == {32}


def test_sentences_carry_their_numbers(setup, parts, requests):
    said = plain(findings.variants_sentence(study.variants(requests)))
    assert "default: 4 of 8 (15.7% to 84.3%) requests differ from the prompt alone, 2 times" in said
    whole = float(parts[parts.step == "GEMM (all three)"].relative_difference.iloc[0])
    assert f"differ by {whole:.1e} of the output's size" in plain(findings.decomposition_sentence(parts))
    agreement = study.path_agreement(setup)
    variants = hand_tables(gemm=2)[0]
    said = plain(findings.conclusion(setup, variants, parts, agreement))
    assert "under the default dispatch 3 of 20" in said and "with one path forced, 2 of 40" in said
    assert "does not end the variance here" in said
    assert "Forcing one path ends the variance" in plain(findings.conclusion(setup, hand_tables()[0], parts, agreement))


# --- Figures ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def drawn():
    """Function (plot function, *its arguments) that draws for real, a warning being an error."""
    made = []

    def draw(plot, *arguments):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            made.append(plot(*arguments))
            made[-1].canvas.draw()
        return made[-1]

    yield draw
    for fig in made:
        plt.close(fig)


@pytest.mark.parametrize("frame", [native_frame(), native_frame(on=0), native_frame(on=4, off=4)])
def test_native_figure(drawn, frame):
    summary = study.native_summary(frame)
    texts, bits = drawn(plots.native_conditions, summary).axes
    assert [bar.get_width() for bar in texts.patches] == (summary["texts changed"] / 4).tolist()
    assert [bar.get_width() for bar in bits.patches] == (summary["margins moved"] / 16).tolist()
    assert texts.get_xlabel() and bits.get_xlabel()


def outlines(ax):
    """FFNs in all under each outline of a histogram drawn as lines, by its label."""
    return {patch.get_label(): patch.get_xy()[1:-1:2, 1].sum() for patch in ax.patches}


def test_rows_figure_holds_every_ffn(drawn, served):
    fig = drawn(plots.rows_per_ffn, served.matmuls, THRESHOLD, "a model")
    default = served.matmuls[served.matmuls.policy == "default"]
    for ax, level in zip(fig.axes, (1, 4), strict=True):
        assert sum(outlines(ax).values()) == default.ffns[default.concurrency == level].sum() > 0
        assert list(ax.lines[0].get_xdata()) == [THRESHOLD + 0.5] * 2
    hand = drawn(plots.rows_per_ffn, matmul_frame(), 4).axes[0]
    kinds = {"decode rows only": 10 + 1, "prefill rows only": 7, "decode and prefill rows together": 5 + 2 + 3}
    assert outlines(hand) == kinds


@pytest.mark.parametrize("counts", [{}, dict(default=10, gemv=0), dict(default=0)])
def test_variants_figure_has_a_point_a_policy_run_and_concurrency(drawn, counts):
    table = hand_tables(**counts)[0].assign(low=0.0)
    fig = drawn(plots.variants_by_policy, table)
    titles = [ax.get_title(matplotlib.rcParams["axes.titlelocation"]) for ax in fig.axes]
    assert titles == ["concurrency 1\n10 requests a run", "concurrency 4\n10 requests a run"]
    for ax, level in zip(fig.axes, (1, 4)):
        for container, run in zip(ax.containers, "AB", strict=True):
            cell = table[(table.concurrency == level) & (table.run == run)].set_index("policy")
            share = (cell["differ from alone"] / cell.requests).reindex(["default", "force-gemm", "force-gemv"])
            assert list(container[0].get_xdata()) == share.tolist()
            assert len(set(container[0].get_ydata())) == 3


def test_decomposition_figure_has_a_point_a_layer_and_step(drawn, parts):
    layers = pd.concat([parts, parts.assign(layer=4)])
    ax = drawn(plots.decomposition, layers).axes[0]
    points = [line for line in ax.lines if line.get_marker() == "o"]
    assert len(points) == parts.step.nunique() == 8 and all(len(line.get_xdata()) == 2 for line in points)
    low, high = ax.get_xlim()
    assert all(low < x < high for line in points for x in line.get_xdata())
    assert [note.get_text() for note in ax.texts].count("0") == 1  # the GEMV, run again


def test_figures_draw_every_policy_there_is(drawn):
    from batch_variance.kernels.nvfp4 import POLICY_NAMES

    base = hand_tables()[0]
    rows = pd.concat([base[base.policy == "default"].assign(policy=name) for name in POLICY_NAMES])
    labels = [label.get_text() for label in drawn(plots.variants_by_policy, rows).axes[0].get_yticklabels()]
    assert sorted(labels) == sorted(POLICY_NAMES)
