"""Parts of a call of an optimized step: which are mispredicted, the graph or what is around it.

    python research/prototypes/call_parts.py

Reads the rows of a results file and the log of the runs that wrote them, which has the parts of each call. Parts are in
percent of the measured call; a positive one takes longer than predicted. Without a log only the whole error is known.

- graph: median of the trial, less the prediction.
- round: at the begin of a round of calls the GPU waits for the host, at most for the host's time of one call. Some
  logs have the time of a call in long rounds, too: what a call takes longer in short ones.
- ways: a whole call on the GPU alone, less its graph and its copies; newer logs only. The newest have the same of the
  sequential graph, which could predict it.
- rest: what is left.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

RESEARCH = Path(__file__).parents[1]
RESULTS = RESEARCH.parent / "validate" / "results" / "compile_h200_20261126.json"
LOG = RESEARCH / "data" / "calls_h200_20261126.txt"
#: Length of a round of calls, in us, and its least number of calls: `gpusim.gpu.optimize.measure`.
ROUND_US, LEAST_CALLS = 30_000.0, 3
#: Largest difference, in us, between a row's prediction and that of its parts: a log has one digit.
SAME_US = 0.3
#: Shares of the predicted saving to try.
SHARES = (1.0, 0.95, 0.9, 0.85)
NUMBER = r"([\d.]+)"
PARTS = re.compile(
    rf"the graph {NUMBER} us \(predicted {NUMBER}, on the GPU alone {NUMBER}, its launch on the host {NUMBER}\), "
    rf"copies (?:around it )?{NUMBER}(?: \({NUMBER} around the sequential graph\))?, the host {NUMBER}"
    rf"(?:, the whole call on the GPU alone {NUMBER})?"
)
ROUNDS = re.compile(rf"a call alone takes {NUMBER} us(?:, {NUMBER} in long rounds)?")


@dataclass(frozen=True)
class Call:
    """One call; times in us."""

    trace: str
    measured: float
    predicted: float
    sequential: float
    predicted_sequential: float
    graph: float = 0.0
    predicted_graph: float = 0.0
    around: float = 0.0
    host: float = 0.0
    ways: float = 0.0
    ways_predicted: float = 0.0
    longer_in_short_rounds: float | None = None

    @property
    def is_known(self) -> bool:
        """Whether its parts are."""
        return self.graph > 0

    @property
    def round_us(self) -> float:
        """Wait of the GPU's for the host at the begin of a round, over the round's calls: measured, or the longest."""
        if self.longer_in_short_rounds is not None:
            return self.longer_in_short_rounds
        return self.host / max(LEAST_CALLS, round(ROUND_US / self.measured))

    def with_share(self, share: float) -> float:
        """Return the prediction if only this share of the predicted saving is realised."""
        graph = self.predicted_graph if self.is_known else self.predicted
        slower = self.predicted_sequential - share * (self.predicted_sequential - graph)
        return max(slower + self.around, self.host)


def calls(results: Path, log: Path) -> Iterator[Call]:
    """Yield the calls of a results file, with their parts where the log has those of the same prediction."""
    parts: dict[str, list[dict[str, float | None]]] = {}
    trace = ""
    for line in log.read_text().splitlines():
        if line.startswith("optimizing "):
            trace = line.split()[1]
        found, rounds = PARTS.search(line), ROUNDS.search(line)
        if found is None or rounds is None:
            continue
        graph, predicted, alone, _, around, sequential, host, whole = (float(each or 0) for each in found.groups())
        parts.setdefault(trace, []).append(
            {
                "graph": graph,
                "predicted_graph": predicted,
                "around": around,
                "host": host,
                "ways": whole - alone - around if whole else 0.0,
                "ways_predicted": sequential - around if sequential else 0.0,
                "longer_in_short_rounds": float(rounds[1]) - float(rounds[2]) if rounds[2] else None,
            }
        )
    for row in json.loads(results.read_text())["cases"]:
        keys = ("measured_ns", "predicted_ns", "sequential_ns", "predicted_sequential_ns")
        call = Call(row["trace"], *(row[key] / 1e3 for key in keys))
        for each in parts.get(call.trace, []):
            known = replace(call, **each)
            if abs(known.with_share(1.0) - call.predicted) < SAME_US:
                call = known
        yield call


def summary(errors: Sequence[float]) -> str:
    """Return the median error, and how many errors are within 5 %."""
    sizes = sorted(map(abs, errors))
    within = sum(size <= 0.05 for size in sizes)
    return f"median {statistics.median(sizes):5.1%}, {within} of {len(sizes)} within 5 %, largest {sizes[-1]:5.1%}"


def _errors(predicted: Sequence[float], rows: Sequence[Call]) -> list[float]:
    return [us / row.measured - 1 for us, row in zip(predicted, rows, strict=True)]


def main() -> None:
    """Print the parts of each error, and the errors if less of the saving were predicted."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", nargs="?", type=Path, default=RESULTS)
    parser.add_argument("log", nargs="?", type=Path, default=LOG)
    given = parser.parse_args()
    rows = list(calls(given.results, given.log))
    print(f"{'step':32} {'longer':>7} {'graph':>7} {'round':>7} {'ways':>7} {'rest':>7}  realised share")
    for row in rows:
        longer = (row.measured - row.predicted) / row.measured
        if not row.is_known:
            print(f"{row.trace:32} {longer:7.1%}")
            continue
        graph = (row.graph - row.predicted_graph) / row.measured
        begin, ways = row.round_us / row.measured, row.ways / row.measured
        rest = longer - graph - begin - ways
        share = (row.sequential - row.graph) / (row.predicted_sequential - row.predicted_graph)
        print(f"{row.trace:32} {longer:7.1%} {graph:7.1%} {begin:7.1%} {ways:7.1%} {rest:7.1%}  {share:.2f}")
    known = [row for row in rows if row.is_known]
    graphs = [row.predicted + row.graph - row.predicted_graph for row in known]
    rounds = [graph + row.round_us for graph, row in zip(graphs, known, strict=True)]
    print(f"as predicted, of {len(known)}: {summary(_errors([row.predicted for row in known], known))}")
    print(f"with the graph of the trial: {summary(_errors(graphs, known))}")
    print(f"and the begin of rounds: {summary(_errors(rounds, known))}")
    if any(row.ways_predicted for row in known):
        ways_too = [each + row.ways_predicted for each, row in zip(rounds, known, strict=True)]
        print(f"and the ways of the sequential graph: {summary(_errors(ways_too, known))}")
    for share in SHARES:
        print(f"{share:4.0%} of the saving: {summary(_errors([row.with_share(share) for row in rows], rows))}")


if __name__ == "__main__":
    main()
