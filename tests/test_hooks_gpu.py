"""The probe on CUDA: captured calls refused, streams and random state untouched, and cuBLAS's batch dependence
found.
"""

import types

import pytest
import torch

from batch_variance.hooks import CallSiteProbe
from batch_variance.hooks.audit import Audit
from batch_variance.hooks.subjects import ModuleSubject

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
ALL = ("rerun", "contents", "composition", "solo", "position", "padding")


def test_a_call_captured_into_a_graph_is_refused_and_the_graph_replays():
    engine = types.SimpleNamespace(kernel=lambda x: x * 2 + 1)
    x = torch.randn(4, 256, device="cuda")
    engine.kernel(x)
    graph = torch.cuda.CUDAGraph()
    with CallSiteProbe((engine, "kernel"), {"x": 0}) as probe:
        with torch.cuda.graph(graph):
            y = engine.kernel(x)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(y, x * 2 + 1)
        assert probe.sampled == 0 and "captured into a CUDA graph" in " ".join(probe.refusals)
        assert set(probe.verdict().values()) == {"inconclusive"}
        engine.kernel(x)  # outside a capture the same probe samples
        assert probe.sampled == 1
    assert probe.verdict()["solo"] == "invariant"


def test_stream_random_state_and_outputs_are_as_without_the_probe():
    def run(probed: bool):
        torch.manual_seed(3)
        seen = []

        def kernel(x, out):
            seen.append(torch.cuda.current_stream().cuda_stream)
            out.copy_(torch.nn.functional.dropout(x, 0.5))
            return out.sum(1)

        engine = types.SimpleNamespace(kernel=kernel)
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            x, out = torch.randn(8, 512, device="cuda"), torch.empty(8, 512, device="cuda")
            if probed:
                with CallSiteProbe((engine, "kernel"), {"x": 0, "out": 0}, axes=ALL) as probe:
                    results = [engine.kernel(x, out) for _ in range(3)]
                assert probe.sampled == 3 and not probe.refusals and probe.verdict()["rerun"] == "invariant"
            else:
                results = [engine.kernel(x, out) for _ in range(3)]
            results += [out, torch.rand(4, device="cuda"), torch.rand(4)]
        side.synchronize()
        assert set(seen) == {side.cuda_stream}
        return results

    for plain, probed in zip(run(False), run(True)):
        assert torch.equal(plain, probed)


def test_cublas_depends_on_the_number_of_rows_and_on_nothing_narrower():
    weight = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    engine = types.SimpleNamespace(linear=lambda x: torch.nn.functional.linear(x, weight))
    x = torch.randn(128, 4096, device="cuda", dtype=torch.bfloat16)
    with CallSiteProbe((engine, "linear"), {"x": 0}, axes=ALL, rows=8) as probe:
        engine.linear(x)
    found = probe.verdict()
    assert found["rerun"] == "invariant" and found["contents"] == "invariant"
    assert "variant" in (found["composition"], found["solo"]), probe.explain().to_string()


def test_the_audit_names_a_planted_fault_on_the_gpu():
    class Threshold(torch.nn.Module):
        def forward(self, x):
            return x * (1.0 if len(x) == 1 else 1.0 + 2**-20)

    model = torch.nn.Sequential(torch.nn.ReLU(), Threshold(), torch.nn.ReLU())
    audit = Audit(ModuleSubject(model, {"input": torch.randn(12, 64, device="cuda")}))
    assert audit.first()["module"] == "1" and audit.flip_seen and audit.rows_told_apart
    assert audit.axes().set_index("axis")["vary"].to_dict() == {
        "rerun": 0,
        "contents": 0,
        "composition": 0,
        "position": 0,
        "solo": 2,
    }
