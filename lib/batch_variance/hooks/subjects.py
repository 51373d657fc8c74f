"""What an audit runs: a model on chosen rows, phase by phase, so that the same row can be had alone and in any batch.

Rows are numbered over twice the batch: the first half are the rows themselves, the second half stand in for them
where only a row's batchmates are to have other contents. All rows are padded alike in every run, alone too, with the
attention mask and the position ids given explicitly: padding is then never what differs.
"""

import contextlib
from typing import Callable, Mapping, Protocol, Sequence

import torch

from ..common import BadInput

DTYPES = ("float32", "bfloat16", "float16")
PROMPTS = (
    "Give three tips for debugging a CUDA out-of-memory error.",
    "What is the capital of France, and what is it known for?",
    "Write a short poem about the sea.",
    "Explain what a hash table is.",
    "How do I boil an egg?",
    "List four uses of copper.",
    "Why is the sky blue at noon and red at sunset?",
    "Tell me a story about a fox and a crow.",
)


class Subject(Protocol):
    """``run(rows, phase)`` runs every phase on these rows and calls ``phase(name)`` before each."""

    module: torch.nn.Module
    count: int

    def run(self, rows: Sequence[int], phase: Callable[[str], None]) -> None: ...


class ModuleSubject:
    """Any torch module whose inputs carry the batch in their first dimension.

    inputs: name -> tensor [2 N, ...]; the second half of the rows are the stand-ins. The one phase is ``forward``.
    """

    def __init__(self, module: torch.nn.Module, inputs: Mapping[str, torch.Tensor]):
        rows = {len(t) for t in inputs.values()}
        if len(rows) != 1 or next(iter(rows)) % 2 or next(iter(rows)) < 4:
            raise BadInput(
                f"inputs have {sorted(rows)} rows: all need one even number, four at least, whose second half stand in for batchmates."
            )
        self.module, self.inputs, self.count = module.eval(), dict(inputs), rows.pop() // 2

    def run(self, rows: Sequence[int], phase: Callable[[str], None]) -> None:
        phase("forward")
        self.module(**{name: t[list(rows)] for name, t in self.inputs.items()})


class CausalSubject:
    """A transformers causal language model: prefill of padded prompts, then decode steps on given tokens.

    The tokens decoded are settled once, from one run of all rows, so that every run takes the same steps.
    """

    def __init__(self, model: torch.nn.Module, ids: torch.Tensor, mask: torch.Tensor, decode_steps: int = 1):
        """ids, mask: int64 [2 N, T], left-padded, mask 1 for real tokens."""
        self.module, self.count, self.decode_steps = model.eval(), len(ids) // 2, decode_steps
        self.ids, self.mask = ids, mask
        self.forced = self.greedy(range(len(ids)), decode_steps) if decode_steps else ids[:, :0]

    def run(self, rows: Sequence[int], phase: Callable[[str], None]) -> None:
        phase("prefill")
        rows = list(rows)
        step = _Steps(self.module, self.ids[rows], self.mask[rows])
        for k in range(self.decode_steps):
            phase("decode")
            step.advance(self.forced[rows, k : k + 1])

    def greedy(self, rows: Sequence[int], tokens: int) -> torch.Tensor:
        """Tokens [rows, tokens] chosen by largest logit (the first of equals), all rows in one batch."""
        return self.greedy_with_logits(rows, tokens)[0]

    @torch.no_grad()
    def greedy_with_logits(self, rows: Sequence[int], tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The tokens, and the logits [rows, vocabulary] of the first step."""
        rows = list(rows)
        step = _Steps(self.module, self.ids[rows], self.mask[rows])
        first, chosen = step.logits, [step.logits.argmax(-1, keepdim=True)]
        for _ in range(tokens - 1):
            step.advance(chosen[-1])
            chosen.append(step.logits.argmax(-1, keepdim=True))
        return torch.cat(chosen, dim=1), first


class _Steps:
    """One batch's prefill and decode steps, with mask and positions spelled out."""

    def __init__(self, model: torch.nn.Module, ids: torch.Tensor, mask: torch.Tensor):
        from transformers import DynamicCache

        self._model, self._mask, self._cache = model, mask, DynamicCache(config=model.config)
        self._positions = (mask.cumsum(-1) - 1).clamp(min=0)
        self._forward(ids, self._positions)

    def advance(self, tokens: torch.Tensor) -> None:
        """Feed tokens [rows, 1]."""
        self._mask = torch.cat([self._mask, self._mask.new_ones(len(tokens), 1)], dim=1)
        self._positions = self._positions[:, -1:] + 1
        self._forward(tokens, self._positions)

    @torch.no_grad()
    def _forward(self, ids: torch.Tensor, positions: torch.Tensor) -> None:
        given = dict(
            input_ids=ids,
            attention_mask=self._mask,
            position_ids=positions,
            past_key_values=self._cache,
            use_cache=True,
        )
        self.logits = self._model(**given, logits_to_keep=1).logits[:, -1]
        if not self._cache.get_seq_length():
            raise BadInput(
                f"{type(self._model).__name__} keeps no KV cache of its own accord, so that its decode steps cannot be audited: "
                "give a causal language model that takes past_key_values."
            )


def causal_subject(
    folder: str,
    batch: int,
    prompts: Sequence[str] = PROMPTS,
    dtype: str = "float32",
    device: str = "cpu",
    decode_steps: int = 1,
    tokens: int = 0,
) -> CausalSubject:
    """Load a transformers folder and pad ``batch`` prompts (numbered repeats where there are fewer) and their
    stand-ins.

    tokens: how many will be generated from a prompt, if more than ``decode_steps``.
    Raises BadInput for another dtype than DTYPES, a model or tokenizer that transformers cannot load, a prompt without
    tokens, and prompts and tokens longer than the model's positions.
    """
    import transformers

    if dtype not in DTYPES:
        raise BadInput(f"dtype {dtype!r} is none that an audit runs in: give one of {', '.join(DTYPES)}.")
    kind = getattr(torch, dtype)
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        with _no_progress_bar():
            model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=kind).to(device)
    except Exception as error:  # what a damaged folder makes transformers raise is of many kinds
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise BadInput(
            f"{folder} cannot be loaded by transformers ({reason}): give a causal language model's folder or hub id."
        ) from None
    texts = [
        prompts[i % len(prompts)] + (f" ({i // len(prompts) + 1})" if i >= len(prompts) else "")
        for i in range(2 * batch)
    ]
    rows = [_chat(tokenizer, text) for text in texts]
    for text, row in zip(texts, rows):
        if not row:
            raise BadInput(f"the prompt {text!r} has no tokens under {folder}'s tokenizer: give another.")
    # The stand-ins take the lengths of those whose place they take: only contents differ.
    rows[batch:] = [_fit(rows[batch + (i + 1) % batch], len(rows[i])) for i in range(batch)]
    # One column more than the longest row needs: transformers leaves the mask out for a batch without padding, so
    # that a row would be computed by another path as soon as any batchmate is padded. With a padded column in every
    # row none is.
    width, tokens = max(map(len, rows)) + 1, max(tokens, decode_steps)
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if positions is not None and width - 1 + tokens > positions:
        raise BadInput(
            f"the longest prompt has {width - 1} tokens, which with {tokens} to come is more than the model's {positions} "
            "positions: give shorter prompts or fewer tokens."
        )
    vocabulary = model.get_input_embeddings().num_embeddings
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id or 0
    pad = pad if pad < vocabulary else 0  # any will do: it is masked
    ids = torch.tensor([[pad] * (width - len(row)) + row for row in rows], device=device)
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows], device=device)
    return CausalSubject(model, ids, mask, decode_steps)


@contextlib.contextmanager
def _no_progress_bar():
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _chat(tokenizer, text: str) -> list[int]:
    if not getattr(tokenizer, "chat_template", None):
        return tokenizer(text)["input_ids"]
    try:
        found = tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=True
        )["input_ids"]
    except Exception:  # no jinja2, or a template that does not take a single user's turn: the text itself serves as well
        return tokenizer(text)["input_ids"]
    return found


def _fit(tokens: list[int], length: int) -> list[int]:
    """Repeat or cut a row of tokens to a length."""
    return (tokens * (length // len(tokens) + 1))[:length]
