"""The results of a soak: a JSON file as it goes on, a table, and a plot."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.soak.processes import Outcome
from benchmarks.soak.slopes import METHOD, WARM_UP, Slope, slope, thinned

#: What is sampled, with units.
SERIES = {
    "resident memory": "MiB",
    "anonymous memory": "MiB",
    "open files": "files",
    "threads": "threads",
    "disk, unnamed files": "MiB",
    "disk, names in the directory": "MiB",
    "disk, used by the tier": "MiB",
    "Python objects": "objects",
    "step, wall time": "ms",
    "young process's step, wall time": "ms",
    "step, CPU time": "ms",
    "young process's step, CPU time": "ms",
    "step, wall time of the young one's": "times",
    "step, CPU time of the young one's": "times",
}
SAMPLE_SECONDS = 10.0
#: Samples of a series in the JSON file.
MOST_SAMPLES = 2000
#: Bad outcomes that are told in full.
_MOST_TOLD = 100
Series = dict[str, list[tuple[float, float]]]


class Results:
    """What a soak has found so far.

    Args:
        about: machine, versions, commit, seed and hours.
        began: seconds since the epoch.
        lines: the file that the long process writes.
    """

    def __init__(self, about: Mapping[str, Any], began: float, lines: Path) -> None:
        self._about, self._began, self._lines = about, began, lines
        self.outcomes: list[Outcome] = []
        self.incidents: list[str] = []

    def write(self, file: Path, *, finished: bool = False) -> dict[str, Any]:
        """Replace the JSON file in one step; returns what it holds."""
        found = self.as_json(finished=finished)
        partial = file.with_name(file.name + ".partial")
        with open(partial, "w") as out:
            json.dump(found, out, indent=1)
            out.flush()
            os.fsync(out.fileno())
        partial.replace(file)
        return found

    def as_json(self, *, finished: bool) -> dict[str, Any]:
        """Everything, in values of JSON."""
        lines = read_lines(self._lines)
        series, processes = of_longest_process(lines, self._began)
        asides = [line["aside"] for line in lines if "aside" in line]
        bad = [each for each in self.outcomes if each.verdict not in ("same", "refused")]
        bad_asides = [
            each for each in asides if each["verdict"] not in ("same", "refused") or each["left"]
        ]
        slopes = {name: slope(values) for name, values in series.items()}
        return {
            "about": dict(self._about),
            "finished": finished,
            "slopes": {name: as_json(found) for name, found in slopes.items()},
            "slopes_by": METHOD,
            "runs": {
                **counted((each.factors, each.verdict) for each in self.outcomes),
                "faults that happened": sum(each.happened for each in self.outcomes),
                "restarts": sum(each.restarts for each in self.outcomes),
            },
            "runs beside the long training": {
                **counted((each["factors"], each["verdict"]) for each in asides),
                "faults that happened": sum(each.get("happened", 0) for each in asides),
            },
            "bad outcomes": [asdict(each) for each in bad[:_MOST_TOLD]],
            "bad outcomes beside": bad_asides[:_MOST_TOLD],
            "long processes": processes,
            "ends": [line for line in lines if "ended" in line],
            "incidents": self.incidents,
            "units": SERIES,
            "samples": {
                name: [(round(t, 1), round(v, 3)) for t, v in thinned(values, MOST_SAMPLES)]
                for name, values in series.items()
            },
        }


def recomputed(found: Mapping[str, Any]) -> dict[str, Any]:
    """The same results with slopes that are computed again from their samples."""
    slopes = {name: as_json(slope(samples)) for name, samples in found["samples"].items()}
    return {**found, "slopes": slopes, "slopes_by": METHOD}


def read_lines(file: Path) -> list[dict[str, Any]]:
    """Lines of JSON; the last one may be half written."""
    if not file.exists():
        return []
    found = []
    for line in file.read_text().splitlines():
        try:
            found.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return found


def of_longest_process(
    lines: Iterable[dict[str, Any]], began: float
) -> tuple[Series, dict[str, int]]:
    """The series of the process with most samples, and how many each process has."""
    samples = [line for line in lines if "samples" in line]
    processes = Counter(str(line["process"]) for line in samples)
    series: Series = {name: [] for name in SERIES}
    if processes:
        longest = processes.most_common(1)[0][0]
        for line in samples:
            if str(line["process"]) == longest:
                for name, value in line["samples"].items():
                    series[name].append((line["time"] - began, float(value)))
    return series, dict(processes)


def counted(outcomes: Iterable[tuple[Mapping[str, str], str]]) -> dict[str, Any]:
    """How many runs there were, by their verdicts and by each factor."""
    verdicts: Counter[str] = Counter()
    factors: dict[str, Counter[str]] = {}
    for of_run, verdict in outcomes:
        verdicts[verdict] += 1
        for name, value in of_run.items():
            factors.setdefault(name, Counter())[value] += 1
    return {
        "number": sum(verdicts.values()),
        "verdicts": dict(verdicts),
        "by": {name: dict(sorted(counts.items())) for name, counts in factors.items()},
    }


def as_json(found: Slope | None) -> dict[str, Any] | None:
    """A slope, and whether zero is inside its interval."""
    return None if found is None else {**asdict(found), "zero_inside": found.is_flat}


def table(found: Mapping[str, Any]) -> str:
    """Slopes and counts, in Markdown."""
    lines = [
        "| sampled | mean | slope per hour | 95 % interval | zero inside |",
        "|---|---|---|---|---|",
    ]
    for name, line in found["slopes"].items():
        unit = found["units"][name]
        if line is None:
            lines.append(f"| {name}, {unit} | | too few samples | | |")
            continue
        inside = "yes" if line["zero_inside"] else "NO"
        lines.append(
            f"| {name}, {unit} | {line['mean']:,.2f} | {line['per_hour']:+z.3f} "
            f"± {line['error']:.3f} | {line['low']:+z.3f} to {line['high']:+z.3f} | {inside} |"
        )
    for title in ("runs", "runs beside the long training"):
        runs = found[title]
        verdicts = ", ".join(f"{count} {name}" for name, count in runs["verdicts"].items())
        lines += ["", f"{title}: {runs['number']} ({verdicts}); "
                  f"faults that happened: {runs['faults that happened']}"]  # fmt: skip
        lines += [
            f"- {name}: " + ", ".join(f"{value} {count}" for value, count in counts.items())
            for name, counts in runs["by"].items()
        ]
    return "\n".join(lines)


def plot(found: Mapping[str, Any], file: Path) -> None:
    """Draw every series with its line.

    Args:
        found: what `Results.write` wrote.
        file: its suffix is the format.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    series = found["samples"]
    columns = 2
    rows = -(-len(series) // columns)
    figure, axes = pyplot.subplots(rows, columns, figsize=(9, 1.7 * rows), sharex=True)
    for axis, (name, samples) in zip(axes.flat, series.items(), strict=False):
        hours = [t / 3600 for t, _ in samples]
        axis.plot(hours, [v for _, v in samples], lw=0.6, color="#1f6f8b")
        if samples:
            left_out = hours[0] + WARM_UP * (hours[-1] - hours[0])
            axis.axvspan(hours[0], left_out, color="#dddddd", lw=0)
        title, line = f"{name}, {found['units'][name]}", found["slopes"][name]
        if line is not None:
            half = (line["high"] - line["low"]) / 2
            title += f": {line['per_hour']:+z.2f} ± {half:.2f} per hour"
        axis.set_title(title, fontsize=8)
        axis.tick_params(labelsize=7)
        values = [v for _, v in samples] or [0.0]
        # From zero where the values are far from it would hide a slope; a flat line needs room.
        room = max(0.05 * max(values), max(values) - min(values), 1e-3)
        axis.set_ylim(min(values) - 0.2 * room, max(values) + 0.5 * room)
    for axis in axes[-1]:
        axis.set_xlabel("hours", fontsize=8)
    figure.tight_layout()
    # Without a date and with fixed names, the same results give the same file.
    matplotlib.rcParams["svg.hashsalt"] = "soak"
    metadata = {"Date": None} if file.suffix == ".svg" else None
    figure.savefig(file, dpi=110, metadata=metadata)
