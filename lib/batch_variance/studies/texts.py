"""What is asked of a model, and where two texts part: prompts as data, and the first token that differs."""

import json
from pathlib import Path

from ..common import BadInput, data_path

# Together with the shipped prompts, enough different ones that a rate is not that of eight texts.
ASKED = (
    "Explain in a few sentences what {} is.",
    "Give three facts about {}.",
    "Write a short story about {}.",
    "What should a beginner know about {}?",
)
SUBJECTS = (
    "the water cycle",
    "a sailing boat",
    "photosynthesis",
    "the city of Rome",
    "a violin",
    "chess",
    "an earthquake",
    "the human heart",
    "a railway",
    "volcanic rock",
    "honey",
    "the moon",
    "a compiler",
    "public speaking",
)


def read_prompts(path: str) -> list[str]:
    """A JSON list of texts; "" is the shipped one. Raises BadInput when the file is missing or something else."""
    file = Path(path) if path else data_path("prompts.json")
    try:
        text = file.read_bytes()
    except FileNotFoundError:
        raise BadInput(f"there is no file {file}: give a JSON list of prompts, or '' for the shipped ones.") from None
    except OSError as error:
        raise BadInput(
            f"{file} cannot be read ({error.strerror}): give a JSON list, or '' for the shipped one."
        ) from None
    try:
        found = json.loads(text)
    except (json.JSONDecodeError, UnicodeDecodeError):
        raise BadInput(f"{file} is not JSON: give a list of strings.") from None
    if not isinstance(found, list) or not found or not all(isinstance(text, str) and text.strip() for text in found):
        raise BadInput(f"{file} holds no list of texts: give a JSON list of at least one string, none of them blank.")
    return found


def many_prompts(count: int) -> list[str]:
    """``count`` different prompts: the shipped ones, then made ones. Raises BadInput below 1 and where there are not so
    many."""
    shipped = read_prompts("")
    made = [asked.format(subject) for subject in SUBJECTS for asked in ASKED]
    if not 1 <= count <= len(shipped) + len(made):
        raise BadInput(f"prompts = {count} is out of range: give 1 ... {len(shipped) + len(made)}.")
    return (shipped + made)[:count]


def first_divergence(a, b) -> int:
    """Index of the first token that differs, -1 when the texts are the same."""
    split = next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))
    return -1 if split == len(a) == len(b) else split
