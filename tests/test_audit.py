"""The audit: planted faults are named as the introducing operation, the rest as propagating, and clean models raise
no alarm.
"""

import json

import pytest
import torch
from click.testing import CliRunner

from batch_variance.cli import main
from batch_variance.common import BadInput
from batch_variance.hooks.audit import Audit, _copy, _joined, carried, part_of, tokens, without_layer
from batch_variance.hooks.command import changes
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
        part_of(torch.arange(15)[None, :, None].expand(1, 15, 4), alone, 2, 5)[0, :, 0], torch.tensor([6, 7, 8])
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
        (["FOLDER", "--dtype", "float3"], "no floating type"),
        (["FOLDER", "--device", "tpu"], "unknown"),
        (["FOLDER", "--tokens", "-1"], "--tokens -1"),
        (["FOLDER", "--rows", "0"], "--rows 0"),
        (["FOLDER", "--prompts", "absent.json"], "no readable JSON"),
        (["FOLDER", "--prompts", "EMPTY"], "not a JSON list"),
        (["EMPTYFOLDER"], "cannot be loaded"),
    ],
)
def test_bad_input_is_one_sentence_and_status_2(folder, tmp_path, arguments, sentence):
    (tmp_path / "empty.json").write_text("[]")
    (tmp_path / "hollow").mkdir()
    swap = {"FOLDER": str(folder), "EMPTY": str(tmp_path / "empty.json"), "EMPTYFOLDER": str(tmp_path / "hollow")}
    done = CliRunner().invoke(main, ["audit", "--device", "cpu", *[swap.get(a, a) for a in arguments]])
    assert done.exit_code == 2 and sentence in done.output, done.output
    assert "Traceback" not in done.output


def test_a_batch_too_small_and_rows_beyond_it_are_refused():
    with pytest.raises(BadInput, match="four at least"):
        ModuleSubject(model(), {"input": torch.randn(2, 3, 16)})
    with pytest.raises(BadInput, match="watched = 9"):
        Audit(ModuleSubject(model(), {"input": torch.randn(8, 3, 16)}), watched=9)


def test_copies_keep_the_inner_strides_of_a_padded_mask_shared_by_heads():
    """GPU attention refuses a mask whose rows are not aligned: one of 46 columns comes cut from 48, shared by heads."""
    mask = torch.randn(3, 1, 7, 48)[..., :46].expand(3, 9, 7, 46)
    copy = _copy(mask)
    assert torch.equal(copy, mask) and copy.stride()[2:] == (48, 1)
    copy[1, 2] = 5.0  # one head's own memory
    assert torch.equal(copy[1, 3], mask[1, 3]) and bool((copy[1, 2] == 5).all())

    joined = _joined([mask[i : i + 1] for i in (2, 0, 0, 1)], 0)
    assert torch.equal(joined, mask[[2, 0, 0, 1]]) and joined.stride()[2:] == (48, 1)
