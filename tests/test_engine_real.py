"""The engine with the real model: transformers' logits and greedy texts, and batching that changes nothing."""

import pytest
import torch

from batch_variance.engine import ChatTokenizer, EngineConfig, Load, Model, load_weights, serve
from batch_variance.engine.experts import prompt_logits
from batch_variance.kernels.nvfp4 import policy
from batch_variance.kernels.sets import EmulatedKernels

CPU = torch.device("cpu")
QUESTIONS = ("Explain in a few sentences why the sky is blue.", "Count from 1 to 20.")
TOKENS = 16


@pytest.fixture(scope="module")
def tokenizer(real_folder):
    return ChatTokenizer(real_folder)


@pytest.fixture(scope="module")
def asked(tokenizer):
    return [tokenizer.chat(question) for question in QUESTIONS]


@pytest.fixture(scope="module")
def runner(real_folder):
    return Model(load_weights(real_folder, CPU), EmulatedKernels(), policy("default"))


@pytest.fixture(scope="module")
def theirs(real_folder):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(real_folder, dtype=torch.float32)


def test_logits_are_transformers_logits(runner, theirs, asked):
    with torch.no_grad():
        expected = theirs(torch.tensor([asked[0]])).logits[0]
    torch.testing.assert_close(prompt_logits(runner, asked[0]), expected, rtol=0, atol=2e-3)


def test_greedy_texts_are_transformers_texts(runner, theirs, asked, tokenizer):
    run = serve(runner, asked, Load(2, 2, TOKENS, seed=0))
    for request, prompt in zip(run.requests, asked):
        made = theirs.generate(torch.tensor([prompt]), max_new_tokens=TOKENS, do_sample=False)[0, len(prompt):].tolist()
        assert request.output == made
    assert "sky" in tokenizer.decode(run.requests[0].output).lower()


@pytest.mark.parametrize("name", ["force-gemv", "force-gemm"])
def test_batching_changes_no_bits_of_the_quantized_model(real_folder, tokenizer, name):
    quantized = Model(load_weights(real_folder, CPU, nvfp4=True), EmulatedKernels(), policy(name))
    asked = [
        tokenizer.encode(text)
        for text in ("The capital of France is", "def add(a, b):\n    return", "Once upon a time, in")
    ]
    config = EngineConfig(prefill_chunk=5, max_length=32)
    alone = {r.prompt: (r.output, r.margins) for r in serve(quantized, asked, Load(1, 3, 3, seed=0), config).requests}
    run = serve(quantized, asked, Load(9, 9, 3, seed=0, jitter=0), config)
    assert max(step.co_resident_rows for step in run.steps) > 32
    for request in run.requests:
        assert (request.output, request.margins) == alone[request.prompt]
