"""What all explorers share: controls, a picture redrawn when one moves, a sentence that reads it, and the output.

It knows ipywidgets and how an output carries both the live control and its twin; what is drawn, the explorers know.
"""

import base64
import html
import io
from typing import Callable

import ipywidgets as W
from IPython.display import display
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from ...common import BadInput
from ...studies.sources import FIGURE, cite_all
from ..figures import METADATA, bundle

DPI = 100
WIDE = W.Layout(width="29.5rem", max_width="100%")
LABEL = {"description_width": "11rem"}


class Explorer:
    """Controls by name, and ``draw(**values)``, which gives a figure and the sentence that says what it shows.

    ``view`` is the widget. The sentence is the picture's alt text too. A BadInput from ``draw`` is shown in its place,
    and the last good picture stays.
    """

    def __init__(self, controls: dict[str, W.ValueWidget], draw: Callable[..., tuple[Figure, str]], title: str):
        self.controls, self._draw = controls, draw
        self.picture, self.sentence = W.HTML(), W.HTML()
        self.picture.add_class("bv-explorer-picture")
        self.sentence.add_class("bv-explorer-sentence")
        self.panel = W.VBox([line(control) for control in controls.values()])
        self.view = W.VBox([W.HTML(f"<strong>{html.escape(title)}</strong>"), self.panel, self.sentence, self.picture])
        self.view.add_class("bv-explorer")
        self._held = False
        for control in controls.values():
            control.observe(self.update, "value")
        self.update()

    @property
    def values(self) -> dict:
        return {name: control.value for name, control in self.controls.items()}

    def set(self, **values) -> None:
        """Move several controls and draw once."""
        self._held = True
        try:
            for name, value in values.items():
                self.controls[name].value = value
        finally:
            self._held = False
        self.update()

    def update(self, *_) -> None:
        """Draw the controls' state."""
        if self._held:
            return
        try:
            fig, words = self._draw(**self.values)
        except BadInput as error:
            self.sentence.value = f'<p role="alert">✗ {html.escape(str(error))}</p>'
            return
        self.sentence.value = f'<p role="status" style="max-width:46rem;line-height:1.4">{html.escape(words)}</p>'
        source = base64.b64encode(_png(fig)).decode()
        self.picture.value = (
            f'<img alt="{html.escape(words)}" src="data:image/png;base64,{source}" style="max-width:100%">'
        )


def canvas(width: float, height: float) -> Figure:
    """A figure that pyplot does not know, without a layout engine: that would take most of the time of drawing it."""
    fig = Figure(figsize=(width, height), dpi=DPI, layout="none")
    FigureCanvasAgg(fig)
    return fig


def present(explorer: Explorer, twin: Figure, name: str, alt: str, tier: str, n: int | str) -> str:
    """Display the live control and its twin as one output; returns the twin's alt text, its numbers citing the
    twin's data, for the sentence below it.

    JupyterLab shows the control; a page, or a viewer without a kernel, the twin, which is a figure like any other.
    """
    data, metadata = bundle(twin, name, alt, tier, n)
    data |= {key: value for key, value in explorer.view._repr_mimebundle_().items() if key != "text/plain"}
    metadata[METADATA]["explorer"] = True
    display(data, metadata=metadata, raw=True)
    return cite_all(alt, f"{FIGURE}{name}")


def _png(fig: Figure) -> bytes:
    png = io.BytesIO()
    fig.savefig(png, format="png", dpi=DPI, pil_kwargs={"compress_level": 1})
    return png.getvalue()


def knob(label: str, value: int, low: int, high: int) -> W.BoundedIntText:
    """A whole number with a label: a field for the keyboard and, ``beside`` it, a slider for the mouse.

    The field is there because JupyterLab takes arrow keys for itself unless text is being edited, and because the
    handle of ipywidgets' slider has no name that a screen reader could say.
    """
    field = W.BoundedIntText(value, min=low, max=high, description=label, style=LABEL, layout=W.Layout(width="17.5rem"))
    field.beside = W.IntSlider(value, low, high, readout=False, layout=W.Layout(width="12rem"))
    for trait in ("max", "value"):
        W.link((field, trait), (field.beside, trait))
    return field


def choice(label: str, options, value) -> W.Dropdown:
    return W.Dropdown(options=options, value=value, description=label, style=LABEL, layout=WIDE)


def line(control: W.Widget) -> W.Widget:
    """A control as it stands in the panel."""
    return (
        W.HBox([control, control.beside], layout=W.Layout(flex_flow="row wrap"))
        if hasattr(control, "beside")
        else control
    )
