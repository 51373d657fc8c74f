"""The divergence explorer: one prompt's text alone and together with others, where they split, and by what margin."""

import html

import ipywidgets as W
import pandas as pd
from matplotlib.figure import Figure

from ...common import BadInput
from ..plots import explorers as plots
from .explorer import Explorer, canvas, choice, present

COLUMNS = ("prompt", "concurrency", "position", "alone", "together", "margin_alone", "margin_together")


def checked(tokens: pd.DataFrame) -> pd.DataFrame:
    """The table with its column ``same``. Raises BadInput where a column is missing or nothing is in it."""
    missing = [name for name in COLUMNS if name not in tokens]
    if missing or tokens.empty:
        said = f"lacks {', '.join(missing)}" if missing else "is empty"
        raise BadInput(
            f"the divergence explorer's table {said}: it needs a row a (prompt, concurrency, position) with "
            f"{', '.join(COLUMNS)}."
        )
    return tokens.assign(same=tokens.alone.astype(str) == tokens.together.astype(str))


class DivergenceExplorer(Explorer):
    """Prompt and concurrency; below the margins, the two texts side by side."""

    def __init__(self, tokens: pd.DataFrame, prompt, concurrency):
        self._tokens = checked(tokens)
        self.texts = W.HTML()
        prompts = [(_short(one), one) for one in dict.fromkeys(self._tokens.prompt)]
        controls = {
            "prompt": choice("prompt", prompts, prompt),
            "concurrency": choice("requests in flight", sorted(set(self._tokens.concurrency)), concurrency),
        }
        super().__init__(controls, self.draw, "Divergence explorer: where a text splits, and by what margin")
        self.view.children = [*self.view.children, self.texts]

    def draw(self, prompt, concurrency) -> tuple[Figure, str]:
        part = self._tokens[(self._tokens.prompt == prompt) & (self._tokens.concurrency == concurrency)].sort_values(
            "position"
        )
        if part.empty:
            raise BadInput(
                f"prompt {_short(prompt)!r} was not served at concurrency {concurrency}: choose another pair."
            )
        fig = canvas(8.4, 2.9)
        ax = fig.subplots()
        fig.subplots_adjust(left=0.11, right=0.79, top=0.9, bottom=0.18)
        plots.margins_on(ax, part)
        ax.set(xlabel="token of the text", ylabel="margin (logits)")
        ax.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
        self.texts.value = side_by_side(part)
        return fig, words(part, concurrency)


def words(part: pd.DataFrame, concurrency: int) -> str:
    """Whether and where the two texts split, with both margins there."""
    split = plots.first_split(part)
    if split is None:
        return (
            f"At concurrency {concurrency} all {len(part)} tokens are those of the prompt served alone; the smallest "
            f"margin alone is {part.margin_alone.min():.3g} logits."
        )
    at = part[part.position == split].iloc[0]
    said = f"At concurrency {concurrency} the texts split at token {split}: {str(at.alone)!r} alone, "
    said += f"{str(at.together)!r} together."
    if pd.notna(at.margin_alone) and pd.notna(at.margin_together):
        said += (
            f" These two requests met a margin there of {at.margin_alone:.3g} logits alone and {at.margin_together:.3g} "
            f"together; their medians are {part.margin_alone.median():.3g} and {part.margin_together.median():.3g}."
        )
    if "noise" in part and pd.notna(at.noise):
        said += f" The noise there is {at.noise:.2g} logits."
    return said


def side_by_side(part: pd.DataFrame) -> str:
    """The two texts as a table of two columns, what follows the split marked."""
    split = plots.first_split(part)
    cells = []
    for column in ("alone", "together"):
        before = part if split is None else part[part.position < split]
        text = html.escape("".join(map(str, before[column])))
        if split is not None:
            after = "".join(map(str, part[part.position >= split][column]))
            text += f'<mark title="from the first split on">{html.escape(after)}</mark>'
        cells.append(f'<td style="vertical-align:top;text-align:left;white-space:pre-wrap;width:50%">{text}</td>')
    return (
        '<table style="width:100%;max-width:60rem;table-layout:fixed"><thead><tr><th scope="col" '
        'style="text-align:left">alone</th>'
        f'<th scope="col" '
        f'style="text-align:left">together</th></tr></thead><tbody><tr>{"".join(cells)}</tr></tbody></table>'
    )


def divergence_explorer(tokens: pd.DataFrame, tier: str, n: int | str, name: str = "divergence-explorer") -> str:
    """Display the explorer; returns a sentence on what its twin shows.

    tokens: a row a (prompt, concurrency, position): ``prompt`` (text or number), ``concurrency``, ``position`` (from
    0), ``alone`` and ``together`` (the token's text, as it is joined), ``margin_alone`` and ``margin_together`` (top-1
    minus top-2 logit that each of these two requests met along its own text, NaN where it is not known) and, where it
    is known, ``noise`` (how far the difference of the two candidates' logits moved).
    Starts at a pair that splits, if any. Raises BadInput for a table without these columns.
    """
    table = checked(tokens)
    pairs = table.groupby(["concurrency", "prompt"], sort=True).same.all()
    split = [pair for pair, same in pairs.items() if not same]
    concurrency, prompt = (split or list(pairs.index))[-1]
    live = DivergenceExplorer(tokens, prompt, concurrency)
    chosen = (split[-2:] or []) + [pair for pair, same in pairs.items() if same][-1:]
    states, said = [], []
    for level, one in chosen:
        part = table[(table.prompt == one) & (table.concurrency == level)].sort_values("position")
        states.append(part.assign(state=f"{_short(one)}, concurrency {level}"))
        said.append(f"{_short(one)}: {words(part, level)}")
    kept = [
        name for name in ("state", "position", "margin_alone", "margin_together", "same", "noise") if name in states[0]
    ]
    twin = plots.divergences(pd.concat(states, ignore_index=True)[kept])
    return present(live, twin, name, " ".join(said), tier, n)


def _short(prompt) -> str:
    text = " ".join(str(prompt).split()) if isinstance(prompt, str) else f"prompt {prompt}"
    return text if len(text) <= 48 else text[:47] + "…"
