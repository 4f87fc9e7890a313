# SPDX-License-Identifier: Apache-2.0
"""`python -m fuzz`: see docs/fuzzing.md."""

from __future__ import annotations

import argparse
import sys

import torch

from fuzz.case import FAMILY, PASSES
from fuzz.classes import CLASSES, DEFAULT
from fuzz.draw import draw
from fuzz.run import Options, one
from fuzz.workers import shared


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m fuzz", description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="of the run: which cases are drawn")
    parser.add_argument("--count", type=int, default=0, help="calls in all; 0 for no limit")
    parser.add_argument("--seconds", type=float, default=0, help="time in all; 0 for no limit")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument(
        "--backend", default="", help='this target or family alone; "auto": the library\'s choice'
    )
    parser.add_argument("--only", type=int, metavar="CASE", help="one case, by the seed that a failure names")
    parser.add_argument("--pass", dest="pass_name", choices=PASSES)
    parser.add_argument("--algorithm", choices=FAMILY)
    parser.add_argument("--dtype", choices=["bfloat16", "float16", "float32", "float64"])
    parser.add_argument(
        "--with", dest="extra", action="append", default=[], choices=CLASSES, help="draw this class"
    )
    parser.add_argument(
        "--without", action="append", default=[], choices=CLASSES, help="do not draw this class"
    )
    parser.add_argument("--workers", type=int, default=1, help="processes, each with its share of the seeds")
    parser.add_argument("--json", metavar="FILE", help="write the counts and failures there")
    return parser.parse_args()


def main() -> int:
    args = arguments()
    fixed = {name: getattr(args, name) for name in ("pass_name", "algorithm", "dtype") if getattr(args, name)}
    classes = (DEFAULT | set(args.extra)) - set(args.without)
    options = Options(args.device, args.backend, frozenset(classes), tuple(fixed.items()))
    if args.only is not None:
        torch.set_num_threads(1)
        case = draw(args.only, options.classes, **fixed)
        print(case.brief())
        tally = one(case, options)
        for failure in tally.failures:
            print("\n    ".join([failure["reproduce"], *failure["wrong"]]))
    elif not (args.count or args.seconds):
        raise SystemExit("python -m fuzz: give --count, --seconds or --only")
    else:
        tally = shared(args.seed, args.count, args.seconds, args.workers, options)
    print(f"{tally.cases} cases, {tally.calls} calls, {len(tally.failures)} failures")
    for name in ("by_pass", "by_algorithm", "by_backend", "skipped", "excused"):
        counts = ", ".join(f"{key} {count}" for key, count in sorted(getattr(tally, name).items()))
        print(f"  {name}: {counts}")
    if args.json:
        tally.write(args.json, args.device, args.seed)
    return 1 if tally.failures else 0


if __name__ == "__main__":
    sys.exit(main())
