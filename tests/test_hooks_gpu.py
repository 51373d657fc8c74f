"""The probe on CUDA: captured calls refused, streams and random state untouched, and cuBLAS's batch dependence
found.
"""

import types

import pandas as pd
import pytest
import torch

from batch_variance.engine import EngineConfig, Load, load_weights, serve
from batch_variance.engine.model import Model
from batch_variance.hooks import CallSiteProbe
from batch_variance.hooks.adapters import engine_sites
from batch_variance.hooks.audit import Audit
from batch_variance.hooks.calls import Call
from batch_variance.hooks.paging import with_own_pages
from batch_variance.hooks.snapshots import bits
from batch_variance.hooks.subjects import ModuleSubject
from batch_variance.kernels.nvfp4.policy import policy
from batch_variance.kernels.sets import TritonKernels

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
ALL = ("rerun", "contents", "composition", "solo", "position", "padding")
both_modes = pytest.mark.parametrize("controls", ["now", "later"])


@both_modes
def test_a_call_captured_into_a_graph_is_refused_and_the_graph_replays(controls):
    engine = types.SimpleNamespace(kernel=lambda x: x * 2 + 1)
    x = torch.randn(4, 256, device="cuda")
    engine.kernel(x)
    graph = torch.cuda.CUDAGraph()
    with CallSiteProbe((engine, "kernel"), {"x": 0}, controls=controls) as probe:
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


@both_modes
def test_stream_random_state_and_outputs_are_as_without_the_probe(controls):
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
                with CallSiteProbe((engine, "kernel"), {"x": 0, "out": 0}, axes=ALL, controls=controls) as probe:
                    results = [engine.kernel(x, out) for _ in range(3)]
                    with torch.cuda.stream(torch.cuda.Stream()):  # made from elsewhere, they run where the call ran
                        probe.run_controls()
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


@pytest.mark.parametrize("name", ["attend", "linear"])
def test_controls_made_later_leave_the_engine_alone_and_say_what_controls_made_now_say(tiny_folder, name):
    model = Model(load_weights(tiny_folder, torch.device("cuda")), TritonKernels(), policy("default"))
    prompts = [torch.randint(0, 256, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (5, 22, 9, 30)]

    def tokens():
        run = serve(model, prompts, Load(4, 8, 12, 0, 0), EngineConfig(max_requests=4, max_length=48, ignore_eos=True))
        return [request.output for request in run.requests]

    plain, records, verdicts = tokens(), {}, {}
    for controls in ("now", "later"):
        with engine_sites(model.kernels, every=7, axes=ALL, rows=2, controls=controls)[name] as probe:
            assert tokens() == plain and probe.records().empty == (controls == "later")
        records[controls], verdicts[controls] = probe.records(), probe.verdict()
        assert probe.sampled > 3 and not probe.refusals and not probe.passed_over
    assert verdicts["now"] == verdicts["later"] and verdicts["now"]["rerun"] == "invariant"
    pd.testing.assert_frame_equal(records["now"], records["later"])
    assert tokens() == plain


def test_the_cache_that_the_engine_writes_on_is_replayed_as_it_was():
    cache = torch.randn(64, 512, device="cuda")
    engine = types.SimpleNamespace(kernel=lambda q, cache: q @ cache.t())
    q = torch.randn(8, 512, device="cuda")
    with CallSiteProbe((engine, "kernel"), {"q": 0}, axes=("rerun",), whole=["cache"], controls="later") as probe:
        for _ in range(3):
            engine.kernel(q, cache)
            cache.add_(1)
    assert probe.sampled == 3 and probe.verdict() == {"rerun": "invariant"}


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


def test_pages_are_gathered_without_waiting_where_the_table_is_short():
    """And where it is long, unread entries and all, by waiting, to the same bits."""
    pool = torch.randint(-(2**31), 2**31 - 1, (300, 2, 16, 8), device="cuda", dtype=torch.int32).view(torch.float32)
    k, v = pool.unbind(1)
    short = torch.tensor([[7, 299, -1], [0, 7, 2**31 - 1]], device="cuda", dtype=torch.int32)
    for table, repeats in ((short, True), (short.repeat(1, 100), False)):
        call = Call({"k": k, "v": v, "table": table}, (), None, None)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error" if repeats else "default")
        try:
            new, own = with_own_pages(call, {"k": "table", "v": "table"}, 2**32)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert len(own) == 3 and new.get("k").shape[0] == (6 if repeats else 3)
        valid = (table >= 0) & (table < 300)
        assert torch.equal(new.get("table")[~valid], table[~valid])
        for name, old in (("k", k), ("v", v)):
            kept = new.get(name)[new.get("table")[valid].long()]
            assert torch.equal(bits(kept), bits(old[table[valid].long()]))
