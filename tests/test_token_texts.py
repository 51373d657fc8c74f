"""The table behind the divergence explorer: which request stands for a prompt, and which margins stand beside its tokens."""

import html

import pandas as pd
import pytest

from batch_variance.reporting.widgets.divergence import DivergenceExplorer
from batch_variance.studies.token_texts import token_table


def request(concurrency, run, number, prompt, text, alone, split):
    names = ["concurrency", "run", "request", "prompt", "text", "alone", "first_divergence"]
    return dict(zip(names, (concurrency, run, number, prompt, text, alone, split)))


REQUESTS = pd.DataFrame(
    [
        request(1, "A", 0, 0, "1 2 3", "1 2 3", -1),
        request(1, "A", 1, 1, "4 5 6", "4 5 6", -1),
        request(8, "A", 0, 0, "1 2 3", "1 2 3", -1),
        request(8, "A", 1, 1, "4 9 9", "4 5 6", 1),
        request(8, "A", 2, 1, "7 5 6", "4 5 6", 0),
        request(8, "B", 1, 1, "4 5", "4 5 6", 2),
        request(8, "twin", 1, 1, "8 8 8", "4 5 6", 0),
    ]
)
POSITIONS = pd.DataFrame(
    [
        dict(concurrency=8, request=r, prompt=prompt, position=i, solo_margin=1.0 + i, margin=2.0 + i + r, best_logit=9.0, second_logit=7.5 - i)
        for r, prompt in ((0, 0), (1, 1), (2, 1))
        for i in range(3)
    ]
)  # fmt: skip


@pytest.fixture
def tokens():
    return token_table(REQUESTS, POSITIONS, lambda token: f" t{token}", ["zero", "one"])


def test_a_prompt_is_shown_by_its_middle_divergence(tokens):
    """Of splits at 0, 1 and 2 the one at 1; the twin and concurrency 1 are left out; the prompt that parts comes first."""
    assert list(dict.fromkeys(tokens.prompt)) == ["one", "zero"] and set(tokens.concurrency) == {8}
    one = tokens[tokens.prompt == "one"]
    assert one.alone.tolist() == [" t4", " t5", " t6"] and one.together.tolist() == [" t4", " t9", " t9"]
    zero = tokens[tokens.prompt == "zero"]
    assert zero.alone.tolist() == zero.together.tolist() == [" t1", " t2", " t3"]


def test_margins_and_noise_are_those_of_the_first_forced_request(tokens):
    one = tokens[tokens.prompt == "one"]
    assert one.margin_alone.tolist() == [1.0, 2.0, 3.0]
    assert one.margin_together.tolist() == [3.0, 4.0, 5.0], "request 1, not 2"
    assert one.noise.tolist() == [0.5, 0.5, 0.5], "9 - (7.5 - i) - (1 + i)"


def test_a_text_that_ends_early_is_filled_up():
    only = REQUESTS[(REQUESTS.run == "B") | (REQUESTS.concurrency == 1)]
    tokens = token_table(only, POSITIONS, lambda token: f" t{token}", ["zero", "one"])
    assert tokens.together.tolist() == [" t4", " t5", ""] and tokens.alone.tolist() == [" t4", " t5", " t6"]


def test_the_explorer_takes_the_table(tokens):
    one = DivergenceExplorer(tokens, "one", 8)
    said = html.unescape(one.sentence.value)
    assert "split at token 1: ' t5' alone, ' t9' together." in said
    assert "The margin there is 2 logits alone and 4 in the batch measured" in said
    assert "noise there is 0.5 logits" in said


def test_positions_that_were_not_forced_have_no_margin():
    tokens = token_table(REQUESTS, POSITIONS[POSITIONS.prompt == 0], lambda token: f" t{token}", ["zero", "one"])
    one = tokens[tokens.prompt == "one"]
    assert one.margin_alone.isna().all() and one.noise.isna().all()
    assert "margin" not in DivergenceExplorer(tokens, "one", 8).sentence.value
