"""The GPU recording's bookkeeping, which needs no GPU: what it counts, what it keeps, what it refuses."""

import pandas as pd
import pytest
import torch

from batch_variance.common import BadInput
from batch_variance.studies.split_scheduler_recording import Recorder, checked_rows, compare, drawn_lengths, main


def results(rows=4):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(rows, 2, 8, generator=generator).bfloat16(), torch.randn(rows, 2, generator=generator)


def alone(pair):
    return {row: tuple(t[row : row + 1].clone() for t in pair) for row in range(len(pair[0]))}


def test_compare_counts_rows_by_changed_split_count():
    batch = results()
    solos = alone(batch)
    splits = {0: 3, 1: 3, 2: 2, 3: 2}
    found, histogram = compare(batch, batch, solos, [3, 3, 3, 3], splits)
    assert (found["solo_differs"], found["rows_split_changed"], found["rerun_differs"], histogram) == (0, 2, 0, {})

    solos[2][0].view(torch.int16)[0, 0, 0] += 1  # one ULP, in a row whose split count changed
    solos[1][1][0, 0] += 1.0  # the LSE alone, in a row whose split count did not
    truth = batch[0].double()
    found, histogram = compare(batch, batch, solos, [3, 3, 3, 3], splits, truth)
    assert (found["solo_differs"], found["differ_split_changed"], found["differ_split_same"]) == (2, 1, 1)
    assert (found["values_differ"], found["ulp_max"], found["batch_closer"], found["solo_closer"]) == (1, 1, 1, 0)
    assert histogram["0"] == 31 and histogram["1"] == 1 and sum(histogram.values()) == 32


def test_compare_sees_a_re_run_that_differs():
    batch = results()
    again = tuple(t.clone() for t in batch)
    again[1][3, 1] += 1
    assert compare(batch, again, alone(batch), [1] * 4, dict.fromkeys(range(4), 1))[0]["rerun_differs"] == 1


def test_rows_and_lengths_drawn():
    assert checked_rows(5) == [0, 1, 2, 3, 4]
    assert len(set(checked_rows(512))) == 24 and max(checked_rows(512)) < 512
    assert drawn_lengths(3, 100, "full", 0) == [100] * 3
    ragged = drawn_lengths(200, 100, "ragged", 0)
    assert 1 <= min(ragged) < max(ragged) <= 100


def test_recorder_replaces_its_own_rows_and_survives_failures(tmp_path, capsys):
    first = Recorder(tmp_path)
    assert first.attempt("no such thing", lambda: 1 / 0) is None and first.failures == 1
    assert "FAILED no such thing" in capsys.readouterr().out
    for batch, value in ((1, 10.0), (2, 20.0)):
        first.time("triton", "default", "shape", batch, value, value)
    first.save()
    second = Recorder(tmp_path)
    second.time("triton", "default", "shape", 2, 30.0, 15.0)
    second.save()
    table = pd.read_csv(tmp_path / "decode.csv")
    assert table[["m", "value", "ratio"]].values.tolist() == [[1, 10, 1], [2, 30, 2]]


def test_refusals(tmp_path, monkeypatch):
    with pytest.raises(BadInput, match="polish"):
        main([str(tmp_path), "polish"])
    with pytest.raises(BadInput, match="folder"):
        main([])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(BadInput, match="GPU"):
        main([str(tmp_path), "bits"])
