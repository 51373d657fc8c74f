"""The audit: planted faults are named as the introducing operation, the rest as propagating, and clean models raise
no alarm.
"""

import json
import shutil

import pytest
import torch
from click.testing import CliRunner

from batch_variance.cli import main
from batch_variance.common import BadInput
from batch_variance.hooks.audit import Audit, tokens, without_layer
from batch_variance.hooks.command import audit_report, changes, summary
from batch_variance.hooks.dispatched import copied
from batch_variance.hooks.parts import Place, carried, place_of
from batch_variance.hooks.subjects import CausalSubject, ModuleSubject, causal_subject


class Mix(torch.nn.Module):
    """Matrix product by explicit multiplications and a halving tree of additions: bits independent of the batch."""

    def __init__(self, size):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(size, size) / size**0.5)

    def forward(self, x):
        y = x[..., None, :] * self.weight
        while y.shape[-1] > 1:
            half = y.shape[-1] // 2
            y = y[..., :half] + y[..., half:]
        return y[..., 0]


class Threshold(torch.nn.Module):
    def forward(self, x):
        return x * (1.0 if len(x) == 1 else 1.0 + 2**-20)


class BatchScale(torch.nn.Module):
    def forward(self, x):
        return x / x.abs().amax()


class Leak(torch.nn.Module):
    def forward(self, x):
        return x + x.roll(1, 0) * 2**-10


class ByPosition(torch.nn.Module):
    def forward(self, x):
        return x * (1.0 + 2**-20 * (torch.arange(len(x)) % 2).view(-1, 1, 1))


class InPlace(torch.nn.Module):
    def forward(self, x):
        y = x.clone()
        y.mul_(2.0)
        y.view(-1, y.shape[-1]).add_(1.0)
        return y


def model(fault=None):
    torch.manual_seed(0)
    parts = [Mix(16), InPlace(), *([fault] if fault else []), Mix(16), torch.nn.ReLU(), Mix(16)]
    return torch.nn.Sequential(*parts)


def audited(fault=None, batch=6):
    x = torch.randn(2 * batch, 3, 16, generator=torch.Generator().manual_seed(1))
    return Audit(ModuleSubject(model(fault), {"input": x}))


def varying(audit):
    frame = audit.axes().set_index("axis")["vary"]
    return {axis for axis in frame.index if frame[axis]}


def test_a_clean_model_has_no_varying_operation_and_its_controls_hold():
    audit = audited()
    assert varying(audit) == set() and audit.first() is None
    assert audit.flip_seen and audit.rows_told_apart and not audit.unmatched and audit.feed_unrepeatable == 0
    assert (audit.sizes()["bit_class"] == 0).all()
    # Three products of one multiplication and four additions, clone, mul_, add_, relu, and the indexing that makes
    # the batch.
    assert len(audit.operations()) == 20


@pytest.mark.parametrize(
    "fault, axes, op",
    [
        (Threshold(), {"solo"}, "mul.Tensor"),
        (BatchScale(), {"contents", "composition", "solo"}, "amax"),
        (Leak(), {"contents", "composition", "position", "solo"}, "roll"),
        (ByPosition(), {"position", "solo"}, "remainder.Scalar"),
    ],
)
def test_a_planted_fault_is_the_only_introducing_operation(fault, axes, op):
    audit = audited(fault)
    assert varying(audit) == axes
    first = audit.first()
    assert (first["module"], first["op"]) == ("2", op)
    frame = audit.operations()
    introducing = frame[frame["introduces"]]
    assert set(introducing["module"]) == {"2"}
    after = frame[(frame["index"] > introducing["index"].max())]
    assert after["propagates"].any() and not after["introduces"].any()
    before = frame[frame["index"] < first["index"]]
    assert not before["inputs_differ"].any() and not before["solo"].any()
    last = after.iloc[-1]
    assert last["inputs_differ"] and last["max_ulp_in"] > 0 and last["max_ulp_out"] > 0


def test_the_batch_size_at_which_an_operation_changes_its_bits():
    class Steps(torch.nn.Module):
        def forward(self, x):
            return torch.ops.audit_toys.steps(x)

    library = torch.library.Library("audit_toys", "DEF")
    library.define("steps(Tensor x) -> Tensor")
    library.impl("steps", lambda x: x * (1.0 + 2**-20 * (len(x) >= 3) + 2**-19 * (len(x) >= 16)), "CPU")
    try:
        audit = audited(Steps())
        sizes = audit.sizes()
        found = changes(sizes[sizes["op"].str.contains("steps")]).to_dict("records")
        assert [(row["classes"], row["changes_at"]) for row in found] == [(3, "3, 16")]
        assert audit.first()["op"] == "audit_toys.steps"
    finally:
        library._destroy()


def test_where_the_batch_lies_in_a_tensor():
    alone = torch.zeros(1, 3, 4)
    assert carried(torch.zeros(5, 3, 4), alone, 5) == 0
    assert carried(torch.zeros(1, 15, 4), alone, 5) == 1
    assert carried(torch.zeros(1, 3, 4), alone, 5) is None
    assert torch.equal(
        Place(1).part(torch.arange(15)[None, :, None].expand(1, 15, 4), alone, 2, 5)[0, :, 0], torch.tensor([6, 7, 8])
    )
    with pytest.raises(Exception, match="in a batch of 5"):
        carried(torch.zeros(4, 3, 4), alone, 5)
    assert without_layer("model.layers.12.mlp.3") == "model.layers.*.mlp.*"


def tiny_llama(folder):
    """A random Llama with a word tokenizer, saved as transformers saves it."""
    import tokenizers
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=64,
        max_position_embeddings=256,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    words = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({f"w{i}": i for i in range(63)} | {"?": 63}, unk_token="?")
    )
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="?", eos_token="w0").save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_llama(tmp_path_factory.mktemp("tiny"))


PROMPTS = ["w1 w2 w3", "w4 w5 w6 w7 w8", "w9", "w10 w11 w12 w13"]


def test_a_transformers_model_prefill_and_decode(folder):
    subject = causal_subject(str(folder), 4, PROMPTS)
    assert isinstance(subject, CausalSubject) and subject.ids.shape == (8, 6)
    assert (subject.mask.sum(1) < 6).all()  # every row is padded, so that none takes the path without a mask
    assert torch.equal(subject.mask[:4], subject.mask[4:]) and not torch.equal(subject.ids[:4], subject.ids[4:])
    audit = Audit(subject)
    frame = audit.operations()
    assert set(frame["phase"]) == {"prefill", "decode"} and not audit.unmatched
    assert audit.flip_seen and audit.rows_told_apart and audit.feed_unrepeatable == 0
    assert not frame["rerun"].any() and not frame["contents"].any()
    assert {"model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj", "lm_head"} <= set(frame["module"])
    # On this machine or another: whatever varies alone must be brought in somewhere.
    if frame["solo"].any():
        assert audit.first() is not None or set(frame[frame["solo"].eq(True)]["spans_batch"]) == {True}
    told = tokens(subject, 4)
    assert len(told) == 4 and not told["rerun_differs"].any()


def test_a_planted_fault_in_one_layer_of_a_transformers_model_is_named(folder):
    subject = causal_subject(str(folder), 4, PROMPTS)
    layer = subject.module.model.layers[1].mlp.up_proj

    def fault(module, args, output):
        return output * (1.0 + 2**-12) if args[0].shape[0] > 1 else output * 1.0

    layer.register_forward_hook(fault)
    audit = Audit(subject)
    frame = audit.operations()
    planted = frame[frame["introduces"] & frame["op"].eq("mul.Tensor")]
    # The hook runs in the module's own frame or its parent's, by the order in which hooks were registered.
    assert len(planted) and planted["module"].str.startswith("model.layers.1.mlp").all()
    assert set(planted["phase"]) == {"prefill", "decode"}


def test_the_command_prints_and_writes(folder, tmp_path):
    (tmp_path / "prompts.json").write_text(json.dumps(PROMPTS))
    out = tmp_path / "audit.json"
    done = CliRunner().invoke(
        main,
        [
            "audit",
            str(folder),
            "--batch",
            "4",
            "--tokens",
            "3",
            "--device",
            "cpu",
            "--prompts",
            str(tmp_path / "prompts.json"),
            "--json",
            str(out),
        ],
    )
    assert done.exit_code == 0, done.output
    assert "introduce" in done.output.splitlines()[-1] and "greedy tokens differ in" in done.output
    report = json.loads(out.read_text())
    assert report["batch"] == 4 and report["tier"] == "cpu-native" and report["dtype"] == "float32"
    assert {row["axis"] for row in report["axes"]} == {"rerun", "contents", "composition", "position", "solo"}
    assert (
        report["controls"]["negative_control"]
        and report["controls"]["positive_control"]
        and report["controls"]["occurred"]
    )
    assert (
        len(report["tokens"]) == 4 and report["operations"] and report["changes_at"] and report["provenance"]["commit"]
    )


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        (["no-such-folder"], "neither a folder here nor a hub id"),
        (["FOLDER", "--batch", "1"], "no batchmates"),
        (["FOLDER", "--dtype", "float3"], "dtype 'float3' is none"),
        (["FOLDER", "--device", "tpu"], "unknown"),
        (["FOLDER", "--tokens", "-1"], "--tokens -1"),
        (["FOLDER", "--rows", "0"], "--rows 0"),
        (["FOLDER", "--prompts", "absent.json"], "no readable JSON"),
        (["FOLDER", "--prompts", "EMPTY"], "not a JSON list"),
        (["FOLDER", "--prompts", "LATIN"], "no readable JSON"),
        (["FOLDER", "--prompts", "BLANK"], "has no tokens"),
        (["FOLDER", "--tokens", "300"], "more than the model's 256 positions"),
        (["FOLDER", "--decode-steps", "300"], "more than the model's 256 positions"),
        (["FOLDER", "--json", "HOLLOW"], "cannot be written"),
        (["FOLDER", "--json", "EMPTY/audit.json"], "cannot be written"),
        (["FOLDER", "--dtype", "float8_e4m3fn"], "auto or one of float32, bfloat16, float16"),
        (["EMPTYFOLDER"], "cannot be loaded"),
        (["DAMAGED"], "cannot be loaded"),
    ],
)
def test_bad_input_is_one_sentence_and_status_2(folder, tmp_path, arguments, sentence):
    (tmp_path / "empty.json").write_text("[]")
    (tmp_path / "latin.json").write_bytes('["caf\u00e9"]'.encode("latin-1"))
    (tmp_path / "blank.json").write_text('["w1", " "]')
    (tmp_path / "hollow").mkdir()
    shutil.copytree(folder, tmp_path / "damaged")
    (tmp_path / "damaged" / "model.safetensors").write_bytes(b"\0" * 64)
    swap = {
        "FOLDER": str(folder),
        "EMPTY": str(tmp_path / "empty.json"),
        "EMPTY/audit.json": str(tmp_path / "empty.json" / "audit.json"),
        "LATIN": str(tmp_path / "latin.json"),
        "BLANK": str(tmp_path / "blank.json"),
        "HOLLOW": str(tmp_path / "hollow"),
        "EMPTYFOLDER": str(tmp_path / "hollow"),
        "DAMAGED": str(tmp_path / "damaged"),
    }
    done = CliRunner().invoke(main, ["audit", "--device", "cpu", "--batch", "4", *[swap.get(a, a) for a in arguments]])
    assert done.exit_code == 2 and sentence in done.output, done.output
    assert "Traceback" not in done.output and "introduce" not in done.output  # and before the audit is run


def test_the_summary_says_what_could_not_be_compared(folder):
    report = audit_report(str(folder), 4, "float32", "cpu", PROMPTS, 0, 1, 0)
    first = report["first_introducing"]
    missing = {"phase": "prefill", "module": "m", "op": "sort", "ran": "both", "why": "in no order"}
    places = [0, first["index"] + 1] if first else [0, 1]
    told = summary({**report, "uncompared": [{"index": i, **missing} for i in places]})
    assert "2 operations could not be compared" in told and "in no order" in told
    told = summary({**report, "first_introducing": None, "uncompared": [{"index": 0, **missing}]})
    assert "1 of them before any" in told and "no operation that was compared introduces a difference" in told
    told = summary({**report, "first_introducing": None})
    assert "no operation introduces a difference" in told and "compared" not in told


def test_a_pad_id_beyond_the_vocabulary_is_replaced(folder, tmp_path):
    import transformers

    shutil.copytree(folder, tmp_path / "padded")
    path = tmp_path / "padded" / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "pad_token": "<beyond>"}))
    subject = causal_subject(str(tmp_path / "padded"), 2, ["w1", "w2 w3"])
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "padded")
    assert tokenizer.pad_token_id >= subject.module.get_input_embeddings().num_embeddings
    assert subject.ids[subject.mask == 0].unique().tolist() == [0]


def test_a_model_that_leaves_its_cache_empty_is_refused(folder):
    subject = causal_subject(str(folder), 2, ["w1", "w2 w3"])
    forward = subject.module.forward
    subject.module.forward = lambda past_key_values, use_cache, **given: forward(use_cache=False, **given)
    with pytest.raises(BadInput, match="keeps no KV cache"):
        CausalSubject(subject.module, subject.ids, subject.mask)


def test_a_batch_too_small_and_rows_beyond_it_are_refused():
    with pytest.raises(BadInput, match="four at least"):
        ModuleSubject(model(), {"input": torch.randn(2, 3, 16)})
    with pytest.raises(BadInput, match="watched = 9"):
        Audit(ModuleSubject(model(), {"input": torch.randn(8, 3, 16)}), watched=9)


def test_copies_keep_the_inner_strides_of_a_padded_mask_shared_by_heads():
    """GPU attention refuses a mask whose rows are not aligned: one of 46 columns comes cut from 48, shared by heads."""
    mask = torch.randn(3, 1, 7, 48)[..., :46].expand(3, 9, 7, 46)
    copy = copied(mask)
    assert torch.equal(copy, mask) and copy.stride()[2:] == (48, 1)
    copy[1, 2] = 5.0  # one head's own memory
    assert torch.equal(copy[1, 3], mask[1, 3]) and bool((copy[1, 2] == 5).all())

    joined = Place(0).joined([mask[i : i + 1] for i in (2, 0, 0, 1)])
    assert torch.equal(joined, mask[[2, 0, 0, 1]]) and joined.stride()[2:] == (48, 1)


# -- what could be blamed on the wrong operation
# -----------------------------------------------------------------------------------------------


class Do(torch.nn.Module):
    def __init__(self, do):
        super().__init__()
        self.do = do

    def forward(self, input):
        return self.do(input)


def audited_steps(*steps, rows=12, watched=2):
    x = torch.randn(rows, 3, 16, generator=torch.Generator().manual_seed(2))
    return Audit(ModuleSubject(torch.nn.Sequential(*map(Do, steps)), {"input": x}), watched)


def nudge(x):
    return 1.0 if len(x) == 1 else 1.0 + 2**-20


def test_where_the_batch_runs_another_operation_no_other_is_blamed():
    audit = audited_steps(lambda x: x * (1 + 2**-20) if len(x) == 1 else x.div(1 + 2**-20), torch.relu)
    assert audit.first() is None
    missing = audit.uncompared()
    assert sorted(missing[["module", "op", "ran"]].values.tolist()) == [
        ["0", "div.Tensor", "in the batch only"],
        ["0", "mul.Tensor", "alone only"],
    ]
    last = audit.operations().iloc[-1]
    assert last["op"] == "relu" and last["solo"] and not last["introduces"]
    assert last["note"].startswith("its inputs differ already; not compared before it") and "div.Tensor" in last["note"]


def test_where_an_operations_entries_do_not_line_up_no_other_is_blamed():
    def among_all(x):
        return torch.softmax(x.flatten(1) @ x.flatten(1).T, -1) @ x.flatten(1)

    audit = audited_steps(among_all, torch.relu)
    frame = audit.operations()
    assert not frame[frame["op"].eq("relu")]["introduces"].any()
    assert set(audit.uncompared()["ran"]) == {"both"} and "mm" in set(audit.uncompared()["op"])


def test_a_copy_that_only_the_batch_makes_does_not_move_the_blame():
    def through_a_copy(x):
        return (x if len(x) == 1 else x.clone()) + 1.0

    audit = audited_steps(through_a_copy, lambda x: x * nudge(x), lambda x: x.clone() - 1.0)
    assert audit.first()["op"] == "mul.Tensor" and audit.first()["module"] == "1" and audit.uncompared().empty


def test_eager_attention_is_compared_and_a_fault_within_it_is_named(folder):
    import transformers

    subject = causal_subject(str(folder), 4, PROMPTS)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    subject = CausalSubject(model, subject.ids, subject.mask)
    clean = Audit(subject)
    operations = clean.operations()
    inside = operations.query("module == 'model.layers.1.self_attn'")
    assert clean.uncompared().empty and inside["op"].str.contains("softmax").sum() == 2
    assert not operations.query("introduces and op == 'mul.Tensor'").size
    softmax = torch.nn.functional.softmax
    layer = model.model.layers[1].self_attn

    def faulty(x, *args, **kwargs):
        y = softmax(x, *args, **kwargs)
        return y * (1.0 + 2**-10 * (x.shape[0] > 1)) if layer.inside else y

    layer.inside = False
    layer.register_forward_pre_hook(lambda *_: setattr(layer, "inside", True))
    layer.register_forward_hook(lambda *_: setattr(layer, "inside", False))
    torch.nn.functional.softmax = faulty
    try:
        audit = Audit(subject)
    finally:
        torch.nn.functional.softmax = softmax
    found = audit.operations().query("introduces and op == 'mul.Tensor'")
    assert found["module"].tolist() == ["model.layers.1.self_attn"] * 2 and found["max_ulp_introduced"].gt(1000).all()


def test_operations_that_return_nothing_are_compared_by_what_they_write():
    def in_place(x):
        y = x.clone()
        torch._foreach_mul_([y], nudge(x))
        return y

    audit = audited_steps(in_place, torch.relu)
    assert audit.first()["op"].startswith("_foreach_mul_")

    def scaled(x, out):
        out.copy_(x * nudge(x))

    library = torch.library.Library("audit_writes", "DEF")
    library.define("scale(Tensor x, Tensor(a!) out) -> ()")
    library.impl("scale", scaled, "CPU")
    try:
        def custom(x):
            out = torch.zeros_like(x)
            torch.ops.audit_writes.scale(x, out)
            return out

        assert audited_steps(custom, torch.relu).first()["op"] == "audit_writes.scale"
    finally:
        library._destroy()


def test_what_is_written_through_data_is_not_taken_for_what_was_there_before():
    def behind_the_version(x):
        y = x + 1.0
        z = y * 2.0
        y.data.mul_(3.0)
        return y * 2.0 + z

    audit = audited_steps(behind_the_version, lambda x: x * nudge(x), behind_the_version)
    frame = audit.operations()
    assert audit.first()["module"] == "1" and set(frame[frame["introduces"]]["module"]) == {"1"}
    assert frame.iloc[-1]["propagates"]


@pytest.mark.parametrize("fault", [None, nudge, lambda x: 1.0 if len(x) == 1 else 3.0])
def test_a_model_with_its_tokens_outermost(fault):
    torch.manual_seed(0)
    weight = torch.randn(16, 16)

    def tokens_first(x):
        y = x.transpose(0, 1).contiguous().view(-1, 16)  # [T B, C]
        y = torch.tanh(y) * (fault(x) if fault else 1.0)
        for _ in range(2):
            y = (y[:, None] * weight).cumsum(-1)[..., -1]
        return y.view(x.shape[1], x.shape[0], 16).transpose(0, 1)

    audit = audited_steps(tokens_first, torch.relu)
    frame = audit.operations()
    near = fault in (None, nudge)  # far: values do not tell where the rows lie, only the memory and the argument do
    assert audit.uncompared().empty and (frame["max_ulp_out"].max() < 1e6) == near
    assert frame[frame["introduces"]]["op"].tolist() == (["mul.Tensor"] if fault else [])
    assert not fault or frame.iloc[-1]["solo"]
    assert (audit.sizes()["bit_class"] == 0).all()


def test_entries_sorted_over_the_whole_batch_are_not_compared_and_blame_nobody():
    def routed(x):
        flat = x.reshape(-1, 16)
        order = flat[:, 0].gt(0).to(torch.int64).argsort(stable=True)
        there = torch.tanh(flat[order])
        return torch.empty_like(flat).index_copy(0, order, there).view(x.shape)

    audit = audited_steps(routed, lambda x: x + 1.0)
    frame = audit.operations()
    assert not frame["introduces"].any() and not frame[frame["module"].eq("1")]["solo"].any()
    assert {"argsort.stable", "sort.stable", "index.Tensor"} & set(audit.uncompared()["op"])
    assert not frame["rerun"].any()


def test_memory_that_nothing_was_written_to_is_no_result():
    def uses_empty(x):
        y = torch.empty_like(x)
        z = x.new_empty(x.shape)
        return y.copy_(x) + z.copy_(x)

    audit = audited_steps(uses_empty, torch.relu)
    assert not audit.operations()["op"].str.contains("empty").any() and varying(audit) == set()


def test_one_row_followed_has_its_positive_control_too():
    audit = audited_steps(lambda x: x * nudge(x), watched=1)
    assert audit.flip_seen and audit.rows_told_apart and audit.first()["op"] == "mul.Tensor"
    same = torch.ones(8, 3, 16)
    alike = Audit(ModuleSubject(torch.nn.Sequential(Do(torch.relu)), {"input": same}), 1)
    assert alike.flip_seen and not alike.rows_told_apart


@pytest.mark.parametrize(
    "several",
    [
        lambda x: torch.stack(x.unbind(0)),
        lambda x: torch.stack(list(x)),
        lambda x: torch.cat([row[None] for row in x]),
        lambda x: torch.cat(torch.split_copy(x, 1)),
    ],
)
def test_as_many_tensors_as_rows_are_not_compared(several):
    audit = audited_steps(lambda x: x + 1.0, several, lambda x: x * nudge(x))
    assert len(audit.uncompared()) and audit.operations().iloc[-1]["solo"]
    assert audit.first() is None or audit.first()["module"] == "2"


def test_another_dtype_in_the_batch_is_a_difference_brought_in_by_what_chose_it():
    audit = audited_steps(lambda x: x.to(torch.float64) if len(x) > 1 else x * 1.0, torch.relu)
    assert len(audit.uncompared())

    def widened(x):
        return torch.ops.aten.sum.dim_IntList(x, [-1], dtype=torch.float64 if len(x) > 1 else torch.float32)

    audit = audited_steps(widened, torch.relu)
    first = audit.first()
    assert first["op"].startswith("sum") and audit.operations().set_index("index")["note"][first["index"]] == (
        "its result is torch.float64 in the batch and torch.float32 alone"
    )
    assert not audit.operations().iloc[-1]["introduces"]


def test_inference_mode_within_a_module():
    def inside(x):
        with torch.inference_mode():
            y = x + 1.0
            y.mul_(nudge(x))
            return y * 2.0

    audit = audited_steps(inside, torch.relu)
    assert audit.first()["op"] == "mul_.Tensor"


def test_nested_and_sparse_tensors_are_not_compared():
    def nested(x):
        n = torch.nested.nested_tensor(list(x)) * 2.0
        return x + n.to_padded_tensor(0.0)

    def sparse(x):
        return x + (x.to_sparse() * 2.0).to_dense()

    for step in (nested, sparse):
        audit = audited_steps(step, lambda x: x * nudge(x))
        assert "it works on nested or sparse tensors" in set(audit.uncompared()["why"])
        assert audit.first()["module"] == "1"


@pytest.mark.parametrize(
    "contaminated, op",
    [(lambda x: x + x[:1] * 2**-5, "add.Tensor"), (lambda x: x + x[:1], "add.Tensor"), (lambda x: x / x.abs().amax(), "amax")],
)
def test_a_batchmates_values_read_by_all_rows_come_in_where_they_are_read(contaminated, op):
    """Also after a difference of one ULP, which all later operations have in their inputs."""
    for steps in ((contaminated, torch.relu), (lambda x: x * nudge(x), contaminated, torch.relu)):
        frame = audited_steps(*steps).operations()
        at = str(len(steps) - 2)
        assert frame[frame["introduces"] & frame["module"].eq(at)]["op"].tolist() == [op]
        assert not frame[frame["module"].eq(str(len(steps) - 1))]["introduces"].any()


def test_rows_that_run_other_operations_alone_are_refused_and_one_is_not():
    def routed(x):
        return x + 1.0 if x.sum() > 0 else x.exp()

    x = torch.stack([torch.ones(3, 16), -torch.ones(3, 16)] * 4)
    subject = ModuleSubject(torch.nn.Sequential(Do(routed)), {"input": x})
    with pytest.raises(BadInput, match="--rows 1"):
        Audit(subject)
    assert not Audit(subject, 1).operations().empty


def test_where_rows_lie_inside_and_where_it_is_not_known():
    alone = [torch.arange(6.0).view(3, 2) + 100 * r for r in range(4)]
    outer, inner = torch.cat(alone), torch.stack(alone, 1).flatten(0, 1)
    assert place_of(outer, alone[:2], [0, 1], 4) == Place(0)
    assert place_of(inner, alone[:2], [0, 1], 4) == Place(0, inner=True)
    assert torch.equal(Place(0, inner=True).part(inner, alone[0], 3, 4), alone[3])
    assert torch.equal(Place(0, inner=True).joined(alone), inner)
    near = inner * (1 + 2**-10)
    assert place_of(near, alone[:2], [0, 1], 4) == Place(0, inner=True)
    far = outer * 50
    with pytest.raises(Exception, match="not known"):
        place_of(far, alone[:2], [0, 1], 4)
    assert place_of(far, alone[:2], [0, 1], 4, step=Place(0).step(outer, 4)) == Place(0)
    assert place_of(far, alone[:2], [0, 1], 4, step=Place(0, inner=True).step(inner, 4)) == Place(0, inner=True)
    assert place_of(far, alone[:2], [0, 1], 4, likely=True) == Place(0, inner=True)
