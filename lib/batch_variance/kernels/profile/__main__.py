"""``python -m batch_variance.kernels.profile --out FOLDER``: the profile without the command line's packages."""

import argparse
import sys
from pathlib import Path

from ...common import BadInput, resolve_device
from . import bench


def main() -> None:
    parser = argparse.ArgumentParser(prog="batch_variance.kernels.profile", description="Profile kernels on this GPU.")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="where profile.csv is written")
    parser.add_argument("--budget-seconds", type=float, default=200.0, help="begin no case after 80%% of it")
    parser.add_argument("--only", default="", metavar="KERNEL,KERNEL", help=f"some of {', '.join(bench.KERNELS)}")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--compile", nargs=3, help=argparse.SUPPRESS)
    given = parser.parse_args()
    resolve_device("cuda")
    if given.child:
        return bench.child(given.child)
    if given.compile:
        plan, index, workers = given.compile
        return bench.compile_share(Path(plan), int(index), int(workers))
    if given.out is None:
        raise BadInput("no folder was given: name one for profile.csv by --out.")
    if not given.budget_seconds > 0:
        raise BadInput(f"--budget-seconds {given.budget_seconds:g} leaves no time: give a number above 0.")
    bench.run(given.out, given.budget_seconds, tuple(name for name in given.only.split(",") if name))


if __name__ == "__main__":
    try:
        main()
    except BadInput as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
