"""Where the repository's data lies, and how a result is written so that it is whole or absent."""

import contextlib
import os
import tempfile
from pathlib import Path
from typing import Callable

from .errors import BadInput


def repository() -> Path:
    """The checkout's top folder: ``BATCH_VARIANCE_HOME``, or the folder above ``lib`` for an editable install."""
    override = os.environ.get("BATCH_VARIANCE_HOME")
    root = Path(override) if override else Path(__file__).resolve().parents[3]
    if not (root / "notebooks").is_dir():
        raise BadInput(f"{root} holds no notebooks folder: set BATCH_VARIANCE_HOME to a checkout of the repository.")
    return root


def data_path(*parts: str) -> Path:
    """Path of a file under ``data/`` of the checkout. It need not exist."""
    return repository().joinpath("data", *parts)


def cache_folder() -> Path:
    """Folder outside git for what is downloaded or derived once: ``BATCH_VARIANCE_CACHE``, or the user's cache."""
    chosen = os.environ.get("BATCH_VARIANCE_CACHE")
    if chosen:
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "batch-variance"


def write_atomically(path: Path | str, write: Callable[[Path], None], replace: bool = True) -> Path:
    """Call ``write(temporary)`` and rename the result to ``path``, so that readers see a whole file or the old one.

    The temporary file lies in the same folder and keeps the suffix. ``replace``: False to leave a file that is there
    already, as it may be by then. Raises BadInput when the folder cannot be written.
    """
    path = Path(path)
    temporary = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(prefix=f".{path.stem}.", suffix=path.suffix, dir=path.parent)
        os.close(handle)
        write(Path(temporary))
        os.chmod(temporary, 0o644)
        if replace:
            os.replace(temporary, path)
        else:
            with contextlib.suppress(FileExistsError):
                os.link(temporary, path)
    except OSError as error:
        raise BadInput(f"{path} cannot be written ({error.strerror or error}): give a folder with room that you may write to.") from error
    finally:
        if temporary is not None and os.path.exists(temporary):
            os.unlink(temporary)
    return path


def check_writable(path: Path | str) -> None:
    """Raises BadInput where ``write_atomically`` could not write ``path``: asked before hours of work."""
    path = Path(path)
    try:
        if path.is_dir():
            raise IsADirectoryError(21, "it is a folder")
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(prefix=f".{path.stem}.", dir=path.parent):
            pass
    except OSError as error:
        raise BadInput(f"{path} cannot be written ({error.strerror or error}): give a file in a folder that you may write to.") from error


def write_text(path: Path | str, text: str) -> Path:
    """Write a text file whole or not at all."""
    return write_atomically(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))
