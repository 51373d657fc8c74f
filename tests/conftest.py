"""Models that several test files share: a tiny random Llama folder, made once, and the real default model."""

import json
import os

# Before torch loads OpenMP: spinning threads are ruinous where other processes want the same cores.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import pytest  # noqa: E402
import torch  # noqa: E402
from safetensors.torch import save_file  # noqa: E402
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers  # noqa: E402

TINY = dict(
    model_type="llama",
    architectures=["LlamaForCausalLM"],
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=272,
    rms_norm_eps=1e-5,
    rope_theta=10000.0,
    hidden_act="silu",
    max_position_embeddings=512,
    tie_word_embeddings=False,
    attention_bias=False,
    mlp_bias=False,
    eos_token_id=256,
    bos_token_id=257,
)
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>{% endif %}"
)


def _write_llama(folder, seed=0, **changes):
    """Write a random Llama in the Hugging Face layout; changes replace entries of TINY."""
    config = {**TINY, **changes}
    hidden, neurons, heads = config["hidden_size"], config["intermediate_size"], config["num_attention_heads"]
    dim = hidden // heads
    generator = torch.Generator().manual_seed(seed)

    def matrix(rows, columns):
        return torch.randn(rows, columns, generator=generator) * 2 / columns**0.5

    tensors = {
        "model.embed_tokens.weight": torch.randn(config["vocab_size"], hidden, generator=generator),
        "model.norm.weight": 1 + 0.1 * torch.randn(hidden, generator=generator),
    }
    if not config["tie_word_embeddings"]:
        tensors["lm_head.weight"] = matrix(config["vocab_size"], hidden)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}{name}.weight"] = 1 + 0.1 * torch.randn(hidden, generator=generator)
        for name, rows in (
            ("q", heads * dim),
            ("k", config["num_key_value_heads"] * dim),
            ("v", config["num_key_value_heads"] * dim),
        ):
            tensors[f"{prefix}self_attn.{name}_proj.weight"] = matrix(rows, hidden)
        tensors[f"{prefix}self_attn.o_proj.weight"] = matrix(hidden, heads * dim)
        for name, shape in (("gate", (neurons, hidden)), ("up", (neurons, hidden)), ("down", (hidden, neurons))):
            tensors[f"{prefix}mlp.{name}_proj.weight"] = matrix(*shape)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in ("<|im_end|>", "<|im_start|>")])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = dict(
        tokenizer_class="PreTrainedTokenizerFast",
        eos_token="<|im_end|>",
        bos_token="<|im_start|>",
        chat_template=TEMPLATE,
    )
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


@pytest.fixture(scope="session")
def write_llama():
    """Function (folder, seed=0, **config changes) that writes a tiny random Llama and returns the folder."""
    return _write_llama


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory):
    """A tiny random Llama: 2 layers, hidden 64, 96 FFN neurons, 4 query and 2 key/value heads, 272 tokens, eos 256."""
    return _write_llama(tmp_path_factory.mktemp("tiny") / "llama")


@pytest.fixture(scope="session")
def real_folder():
    """The default model's folder, fetched on first use."""
    from batch_variance.engine import hf_folder

    return hf_folder()
