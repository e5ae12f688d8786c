"""Results of collectives for tests: one measured with a tail, and simulations."""

from __future__ import annotations

import numpy as np

from tf_ipu_dp.collectives import results


def make_measured(trials=1000, title="R4 on <4> hosts"):
    """Returns 4 ranks at 1 Gbit/s with timeouts, probes, late ranks and noise: the same at every call."""
    random = np.random.RandomState(1)
    seconds = 0.0125 + random.exponential(0.0002, trials)
    timeouts, probes, fast = np.zeros((3, trials))
    late = random.random_sample((trials, 4)) * 2e-5
    late[::3, 2] += 2e-3
    late -= late.min(axis=1, keepdims=True)
    if trials >= 100:
        seconds[5::50] += 0.2
        timeouts[5::50] = 1
        probes[5::100] = timeouts[5::100]
        timeouts[55::100] = 0
        probes[55::100] = 1
        seconds[11] += 0.03
        fast[11:40] = 1
        seconds[7] += 0.04
        late[7, 3] = 0.039
        seconds[9] += 0.05
    facts = results.SeriesFacts(4, 971_048, link_bytes_per_s=1.25e8)
    series = results.Series(
        facts, seconds, np.tile(seconds[:, None], 4), late, seconds - 0.0015, timeouts, probes, fast
    )
    about = results.Description(
        results.MEASURED, title, "Horovod 0.28.1 on Gloo", "ring", (facts,), "r4", {"cores": "2"}, ("A note.",)
    )
    return results.Result(about, (series,))


def make_simulated(ranks=4, sizes=(971_048,), trials=2000, label=""):
    random = np.random.RandomState(2)
    series = []
    for size in sizes:
        ideal = 2 * (ranks - 1) / ranks * size / 1.25e8
        facts = results.SeriesFacts(ranks, size, link_bytes_per_s=1.25e8, label=label)
        series.append(results.Series(facts, ideal * 1.02 * (1 + 0.01 * random.random_sample(trials))))
    facts = tuple(each.facts for each in series)
    return results.Result(results.Description(results.SIMULATED, "predicted", "fast", "ring", facts), tuple(series))
