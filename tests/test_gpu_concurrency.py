"""Forced texts and the concurrency study's worker processes on a GPU: alone nothing moves, in a batch bits do.
Skipped without CUDA.
"""

import json

import pytest
import torch

from batch_variance.studies import concurrency as study
from batch_variance.studies import concurrency_tables as tabled

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


@pytest.mark.parametrize("ffn", ["dense", "moe"])
def test_forced_and_free_runs_from_worker_processes(tiny_folder, tmp_path, ffn):
    prompts = tmp_path / "prompts.json"
    prompts.write_text(json.dumps(["Why?", "What is a batch of rows?", "Name three colours, please.", "x"]))
    p = study.Parameters.checked(
        dict(
            model=str(tiny_folder),
            ffn=ffn,
            experts=6,
            top_k=4,
            expert_split="contiguous",
            mechanisms=["all"],
            threshold=4,
            storage="bfloat16",
            logits="float32",
            concurrencies=[1, 8],
            requests=32,
            alone_requests=4,
            forced_requests=32,
            twin_concurrencies=[8],
            parity_concurrency=8,
            tokens=8,
            stop_width=0.0,
            prompts=str(prompts),
            prompt_count=4,
            seed=0,
            device="cuda",
            processes=2,
            record="",
        )
    )
    setup = study.prepare(p)
    requests, forced = study.serve_free(setup), study.serve_forced(setup)
    twin = requests[requests.run == "twin"]
    assert len(twin) == 32 and (twin.first_divergence == -1).all()
    assert (requests[requests.concurrency == 1].first_divergence == -1).all()
    alone = requests[requests.run == "A"].drop_duplicates("prompt").set_index("prompt").alone
    assert {prompt: [int(t) for t in text.split()] for prompt, text in alone.items()} == setup.solo.texts
    positions = forced.positions
    assert (positions[positions.concurrency == 1].logits_other_bits == 0).all()
    assert (positions[positions.concurrency == 8].logits_other_bits > 0).any()
    tables = tabled.tables(setup, study.Results(requests, forced))
    assert set(tables) == set(tabled.TABLES)
