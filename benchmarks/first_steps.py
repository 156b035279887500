"""Rows of the first steps of a longer run: ``python -m benchmarks.first_steps RESULTS.json N``.

A run of fixed sizes does the same steps whether it ends after N tokens or later. So the step log of
one long run says what shorter ones take, and those of other systems can stand beside it. Rows are
added to the file for each depth that has a step log; what only the whole run knows is left out.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gapless.protos.step_log import Steps, read_step_log


def first_steps(row: dict[str, Any], steps: Steps, count: int) -> dict[str, Any]:
    """The row of the first `count` steps of the run that `row` describes and `steps` recorded.

    Args:
        row: of one run in which all requests have one size.
        steps: its log, the prompts in the first step.
        count: tokens of each request, at least 2.
    """
    work = row["work"]
    assert 2 <= count < work["new"], count
    own = steps[1 : count + 1]  # the first record is of the step before the run
    assert int(own["row_count"].min()) == work["batch"], "the prompts took more than one step"
    seconds = int(own["finished_ns"][-1] - own["built_from_ns"][0]) / 1e9
    period_ms = np.diff(own["started_ns"].astype(np.int64)) / 1e6
    kept = ("system", "mode", "gpu", "versions", "run_id", "dtype", "attention")
    return {name: row[name] for name in kept} | {
        "work": {**work, "new": count},
        "seconds": round(seconds, 4),
        "ms_per_step_p50": round(float(np.median(period_ms[1:])), 4),
        "ms_per_step_p99": round(float(np.percentile(period_ms[1:], 99)), 4),
        "tokens_per_s": round(work["batch"] * count / seconds, 1),
        "command": f"the first {count} steps of: {row['command']}",
    }


def main(arguments: Sequence[str]) -> int:
    """Adds the rows, in place of those it added before."""
    parser = argparse.ArgumentParser(prog="first_steps", description=__doc__)
    parser.add_argument("results", type=Path, help="list of runs, as gapless bench writes it")
    parser.add_argument("counts", type=int, nargs="+", metavar="N", help="tokens of each request")
    options = parser.parse_args(arguments)
    rows = [
        row
        for row in json.loads(options.results.read_text())
        if not row["command"].startswith("the first ")
    ]
    for row in [row for row in rows if row.get("steps_file")]:
        steps = read_step_log(options.results.parent / row["steps_file"])
        rows += [first_steps(row, steps, count) for count in options.counts]
    options.results.write_text(json.dumps(rows, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
