"""What the search gains over the best policy, and what is left near the best (no arguments).

From the newest results of the fair comparison: for each step and choice of kernels, the schedules tried on a GPU, how
many of them were within 5 % of the fastest, the best policy's time over the search's, the same by each one's fastest
recording, and the fastest time over the largest bound (of captured kernels). Then means, and errors of predictions for
the search. From the newest neighbourhoods: for each step the schedules within 5 % of the fastest, the best policy's
time over that of the fastest and of the searched schedule, and how many are predicted and measured faster than it;
means over all steps, and over those of the fair comparison. From the three neighbourhoods of GoogLeNet's inference
together: the distinct schedules, and those within 5 % of the fastest of their run. Run it in the repository's root.
"""

from __future__ import annotations

import statistics
from collections.abc import Collection, Sequence
from pathlib import Path

from gpusim.defaults import SEARCH
from gpusim.formats.results import ResultCase, newest_results, read_results
from gpusim.policies.registry import POLICIES
from gpusim.validation.models import NEAR_FRAC
from gpusim.validation.replayed import SUFFIX, read_replayed
from gpusim.validation.statistics import by_step, counted_replays

RESULTS = Path("validate/results")
#: A step with several neighbourhoods, and their recipes.
POOLED, POOLED_RECIPES = "googlenet-infer-b1", ("neighbours", "neighbours_few", "neighbours_more")


def near(times_ns: Sequence[int]) -> int:
    """Return how many times are near the least."""
    return sum(ns <= (1 + NEAR_FRAC) * min(times_ns) for ns in times_ns)


def fair(cases: Sequence[ResultCase]) -> None:
    """Print a row for each step and choice of kernels of the fair comparison, and the means."""
    gains: dict[str, list[tuple[float, float]]] = {}
    print("| step | kernels | tried | near the fastest | policy over search | by fastest recordings | over the bound |")
    print("|---|---|--:|--:|--:|--:|--:|")
    for step, of_step in by_step(counted_replays(cases)).items():
        for kernels in ("captured", "chosen"):
            rows = {case.policy: case for case in of_step if case.kernels == kernels}
            if SEARCH not in rows:
                continue
            searched = rows[SEARCH]
            planned = [case for policy, case in rows.items() if policy in POLICIES]
            tried_ns = [ns for case in rows.values() for ns in case.tried_ns]
            best_ns = min(case.measured_ns for case in planned)
            gain = best_ns / searched.measured_ns, min(case.fastest_ns for case in planned) / searched.fastest_ns
            gains.setdefault(kernels, []).append(gain)
            bound = f"{min(best_ns, searched.measured_ns) / max(searched.bounds_ns.values()):.2f}"
            row = f"| {step} | {kernels} | {len(tried_ns)} | {near(tried_ns)} | {gain[0]:.3f} | {gain[1]:.3f} |"
            print(row, f"{bound if kernels == 'captured' else ''} |")
    for kernels, each in gains.items():
        by_median, by_fastest = (statistics.geometric_mean(column) for column in zip(*each, strict=True))
        several = sum(gain >= 1.05 for gain, _ in each)
        errors = [case.error for case in counted_replays(cases) if (case.policy, case.kernels) == (SEARCH, kernels)]
        print(
            f"{kernels}: {len(each)} steps, {by_median:.3f} ({min(each)[0]:.3f} to {max(each)[0]:.3f}), "
            f"{several} of 1.05; by fastest recordings {by_fastest:.3f}; errors of the search: median "
            f"{statistics.median(map(abs, errors)):.1%}, largest {max(map(abs, errors)):.1%}"
        )


def neighbours(cases: Sequence[ResultCase], compared: Collection[str]) -> None:
    """Print a row for each neighbourhood, and the geometric means of all, and of the steps that were compared."""
    print(
        "\n| step | schedules | near the fastest | policy over the fastest | over the searched | over the bound |",
        end="",
    )
    print(" predicted faster than the policy | measured |\n|---|--:|--:|--:|--:|--:|--:|--:|")
    left: dict[str, float] = {}
    gained: dict[str, float] = {}
    for step, of_step in by_step(counted_replays(cases)).items():
        times_ns = [case.measured_ns for case in of_step]
        (policy,) = (case for case in of_step if case.policy in POLICIES)
        (searched,) = (case for case in of_step if case.policy == SEARCH)
        left[step] = policy.measured_ns / min(times_ns)
        gained[step] = policy.measured_ns / searched.measured_ns
        bound = min(times_ns) / max(policy.bounds_ns.values())
        over = f"{left[step]:.3f} | {gained[step]:.3f} | {bound:.2f}"
        predicted = sum(case.predicted_ns < policy.predicted_ns for case in of_step)
        measured = sum(ns < policy.measured_ns for ns in times_ns)
        print(f"| {step} | {len(times_ns)} | {near(times_ns)} | {over} | {predicted} | {measured} |")
    for steps in (left.keys(), left.keys() & set(compared)):
        fastest, searches = (statistics.geometric_mean(of[step] for step in steps) for of in (left, gained))
        most = max(left[step] for step in steps)
        over = f"over the fastest {fastest:.3f}, {most:.3f} at most; over the searched {searches:.3f}"
        print(f"{len(steps)} steps: policy {over}")


def pooled() -> None:
    """Print the schedules of one step over several neighbourhoods: on several streams, distinct, near the fastest."""
    schedules, close, left, lost = set(), set(), [], []
    for recipe in POOLED_RECIPES:
        results = newest_results(RESULTS, recipe)
        replayed = [each for each in read_replayed(results.with_name(results.stem + SUFFIX)) if each.trace == POOLED]
        several = [each for each in replayed if max(each.stream_of) > 0]
        least_ns = min(each.measured_ns for each in several)
        schedules |= {(each.order, each.stream_of) for each in several}
        close |= {(each.order, each.stream_of) for each in several if each.measured_ns <= (1 + NEAR_FRAC) * least_ns}
        left += [each.measured_ns / least_ns for each in several if each.policy in POLICIES]
        lost += [each.measured_ns / least_ns for each in several if each.policy == SEARCH]
    over, searched = (", ".join(f"{each:.4f}" for each in ratios) for ratios in (left, lost))
    print(f"{POOLED}: {len(schedules)} schedules, {len(close)} near the fastest of their run; policy over it {over}")
    print(f"{POOLED}: searched over the fastest of their run {searched}")


def main() -> None:
    """Print all three."""
    compared = read_results(newest_results(RESULTS, "fair")).cases
    fair(compared)
    neighbours(read_results(newest_results(RESULTS, "neighbours")).cases, by_step(compared))
    pooled()


if __name__ == "__main__":
    main()
