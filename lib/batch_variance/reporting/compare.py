"""What changed between two reports: verdicts, values, notebooks, versions. It reads summary.json, and runs nothing."""

import json
from pathlib import Path
from typing import Any

from ..common import BadInput
from .checks import readable


def read_summary(path: Path | str) -> dict[str, Any]:
    """A report's summary.json, given by its own path or the report's folder. Raises BadInput for anything else."""
    path = Path(path)
    file = path / "summary.json" if path.is_dir() else path
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise BadInput(f"there is no report at {path}: give a report's folder or its summary.json.") from None
    except (OSError, ValueError) as error:
        raise BadInput(
            f"{file} cannot be read as JSON ({type(error).__name__}): give a report's summary.json."
        ) from None
    lists = isinstance(found, dict) and all(isinstance(found.get(name), list) for name in ("notebooks", "checks"))
    whole = (
        lists
        and isinstance(found.get("provenance"), dict)
        and all(
            isinstance(one, dict) and {"id", "notebook", "claim", "verdict", "value"} <= one.keys()
            for one in found["checks"]
        )
        and all(isinstance(one, dict) and "name" in one for one in found["notebooks"])
    )
    if not whole:
        raise BadInput(f"{file} is no summary of a report: it lacks notebooks, checks or provenance.")
    return found


def compare(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """What the index page shows of two summaries.

    Returns ``before`` (commit, date, quick of the earlier), ``changes`` (check id, claim, page, what, before, after; a
    changed verdict first), ``same`` (checks without a change), ``absent`` (earlier checks of notebooks that this report
    does not run), ``notebooks`` (name, seconds before and after, status before and after),
    ``versions`` (what, before, after).
    """
    running = {one["name"] for one in after["notebooks"]}
    finished = {one["name"] for one in after["notebooks"] if one["status"] == "ok"}
    old = {one["id"]: one for one in before["checks"]}
    new = {one["id"]: one for one in after["checks"]}
    changes, same = [], 0
    for id, one in new.items():
        was = old.get(id)
        if was is None:
            changes.append((1, one, "new check", "–", one["verdict"]))
        elif was["verdict"] != one["verdict"]:
            changes.append((0, one, "verdict", was["verdict"], one["verdict"]))
        elif was["value"] != one["value"]:
            changes.append((2, one, "value", readable(was["value"]), readable(one["value"])))
        else:
            same += 1
    gone = [one for id, one in old.items() if id not in new]
    changes += [(1, one, "check gone", one["verdict"], "–") for one in gone if one["notebook"] in finished]
    times = {one["name"]: one for one in before["notebooks"]}
    notebooks = [
        {
            "name": one["name"],
            "before": times.get(one["name"], {}).get("seconds"),
            "after": one.get("seconds"),
            "status_before": times.get(one["name"], {}).get("status", "absent"),
            "status": one["status"],
        }
        for one in after["notebooks"]
    ]
    return {
        "before": {name: before["provenance"].get(name, "unknown") for name in ("commit", "date", "quick", "device")},
        "changes": [
            {
                "id": one["id"],
                "claim": one["claim"],
                "what": what,
                "before": a,
                "after": b,
                "here": one["id"] in new,
                "notebook": one["notebook"],
            }
            for _, one, what, a, b in sorted(changes, key=lambda item: item[0])
        ],
        "same": same,
        "absent": sum(one["notebook"] not in running for one in gone),
        "notebooks": notebooks,
        "versions": _versions(before["provenance"], after["provenance"]),
    }


def _versions(before: dict[str, Any], after: dict[str, Any]) -> list[dict[str, str]]:
    flat = [
        {
            name: str(value)
            for name, value in (
                {k: one.get(k) for k in ("python", "processor", "threads", "gpu", "driver", "device", "quick")}
                | (one.get("packages") or {})
            ).items()
        }
        for one in (before, after)
    ]
    names = list(dict.fromkeys([*flat[0], *flat[1]]))
    pairs = [(name, flat[0].get(name, "absent"), flat[1].get(name, "absent")) for name in names]
    return [{"what": name, "before": a, "after": b} for name, a, b in pairs if a != b]
