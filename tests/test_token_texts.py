"""The table behind the divergence explorer: which request stands for a prompt, and its own margins beside its tokens."""

import html

import pandas as pd
import pytest

from batch_variance.reporting.widgets.divergence import DivergenceExplorer
from batch_variance.studies.token_texts import token_table


def request(concurrency, run, number, prompt, text, alone, split, second=None, margins=None):
    """second: runners-up along the text. Alone every margin is 1 + its position, and 0 comes second."""
    length, solo = len(text.split()), len(alone.split())
    return {
        "concurrency": concurrency,
        "run": run,
        "request": number,
        "prompt": prompt,
        "text": text,
        "alone": alone,
        "first_divergence": split,
        "margins": margins or " ".join(["0.25"] * length),
        "runners_up": second or " ".join(["0"] * length),
        "alone_margins": " ".join(str(1.0 + place) for place in range(solo)),
        "alone_runners_up": "0 9 0"[: 2 * solo - 1],
    }


REQUESTS = pd.DataFrame(
    [
        request(1, "A", 0, 0, "1 2 3", "1 2 3", -1),
        request(1, "A", 1, 1, "4 5 6", "4 5 6", -1),
        request(8, "A", 0, 0, "1 2 3", "1 2 3", -1, second="0 8 0"),
        request(8, "A", 1, 1, "4 9 9", "4 5 6", 1, second="0 5 2", margins="1.5 0.5 7.0"),
        request(8, "A", 2, 1, "7 5 6", "4 5 6", 0),
        request(8, "B", 1, 1, "4 5", "4 5 6", 2),
        request(8, "twin", 1, 1, "8 8 8", "4 5 6", 0),
    ]
)


@pytest.fixture
def tokens():
    return token_table(REQUESTS, lambda token: f" t{token}", ["zero", "one"])


def test_a_prompt_is_shown_by_its_middle_divergence(tokens):
    """Of splits at 0, 1 and 2 the one at 1; the twin and concurrency 1 are left out; the prompt that parts comes first."""
    assert list(dict.fromkeys(tokens.prompt)) == ["one", "zero"] and set(tokens.concurrency) == {8}
    one = tokens[tokens.prompt == "one"]
    assert one.alone.tolist() == [" t4", " t5", " t6"] and one.together.tolist() == [" t4", " t9", " t9"]
    zero = tokens[tokens.prompt == "zero"]
    assert zero.alone.tolist() == zero.together.tolist() == [" t1", " t2", " t3"]


def test_margins_are_those_that_the_shown_request_met(tokens):
    one = tokens[tokens.prompt == "one"]
    assert one.margin_alone.tolist() == [1.0, 2.0, 3.0]
    assert one.margin_together.tolist() == [1.5, 0.5, 7.0], "request 1 of run A, not 2 and not B's"


def test_noise_is_the_move_of_the_same_two_candidates(tokens):
    """0: 1 to 1.5. 1: the same two, now the other ahead by 0.5: 2 to -0.5. 2: past the split, another context."""
    noise = tokens[tokens.prompt == "one"].noise
    assert noise.iloc[:2].tolist() == [0.5, 2.5] and pd.isna(noise.iloc[2])


def test_another_second_candidate_leaves_the_noise_open(tokens):
    """Alone 9 comes second at position 1, in the batch 8: the two margins have one logit in common."""
    noise = tokens[tokens.prompt == "zero"].noise
    assert noise.iloc[[0, 2]].tolist() == [0.75, 2.75] and pd.isna(noise.iloc[1])


def test_a_text_that_ends_early_is_filled_up():
    only = REQUESTS[(REQUESTS.run == "B") | (REQUESTS.concurrency == 1)]
    tokens = token_table(only, lambda token: f" t{token}", ["zero", "one"])
    assert tokens.together.tolist() == [" t4", " t5", ""] and tokens.alone.tolist() == [" t4", " t5", " t6"]
    assert tokens.margin_together.iloc[:2].tolist() == [0.25, 0.25] and pd.isna(tokens.margin_together.iloc[2])
    assert "margin" not in DivergenceExplorer(tokens, "one", 8).sentence.value, "nothing was chosen there together"


def test_the_explorer_takes_the_table(tokens):
    one = DivergenceExplorer(tokens, "one", 8)
    said = html.unescape(one.sentence.value)
    assert "split at token 1: ' t5' alone, ' t9' together." in said
    assert "a margin there of 2 logits alone and 0.5 together; their medians are 2 and 1.5" in said
    assert "noise there is 2.5 logits" in said
