"""Predicts the speed at every draft length, from the costs of rounds and the acceptance of texts.

In: measurements of a pair, and generations to replay. Out: a ``Forecast``, whose interval covers the variation of the
machine and of the texts together.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cli.repeats import typical

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from adaptive.control.costs import CostModel, CostTable
    from adaptive.pair import Pair
    from trainers.dataset import Example

# Bootstrap samples of the generations and of the machine, for the interval of the predicted speed-up.
RESAMPLES = 2000
# Number of acceptance rates tried for the break-even.
STEPS = 1000


@dataclass(frozen=True)
class Forecast:
    """The prediction for every draft length from 0, and the conclusions.

    ``acceptance`` is the mean over all positions. ``tokens_per_round`` and ``tokens_per_second`` have an entry for
    every length; they are those of whole generations: the last round of each may draft in vain, and the draft reads
    each prompt. ``speed_up`` is that of ``draft_length`` over plain decoding; its 95% interval covers the choice of
    generations and the time of the measurements. ``break_even`` is the acceptance (equal at all positions) below which
    no length pays. ``by_acceptance`` has (acceptance, best length, its speed-up) for some acceptances. Both are of
    generations without an end.
    """

    costs: CostTable
    generations: int
    acceptance: float
    tokens_per_round: tuple[float, ...]
    tokens_per_second: tuple[float, ...]
    draft_length: int
    speed_up: float
    speed_up_interval: tuple[float, float]
    break_even: float
    by_acceptance: tuple[tuple[float, int, float], ...]


def predict(repeats: Sequence[CostTable], sample: Sequence[Example], pair: Pair) -> Forecast:
    """Predict the rate of every length: tokens of a round at that length, by replay, over its seconds.

    ``repeats`` are independent measurements; a single one gives no variation of the machine.
    """
    import numpy as np

    from adaptive.control.costs import LONGEST, CostModel
    from trainers.replay import acceptance_rate, expected_rounds, replay_on

    assert pair.draft is not None
    replays, costs = replay_on(pair.draft, sample), typical(repeats)
    context = int(statistics.mean(len(e.prompt) + len(e.output) / 2 for e in sample))

    def at_context(table: CostTable) -> CostModel:
        model = CostModel(table)
        model.at(context)
        return model

    model, lengths = at_context(costs), range(LONGEST + 1)
    seconds = [model.round(k) for k in lengths]
    positions = np.array([r.positions for r in replays], float)
    decoded, prompts = sum(r.positions for r in replays), sum(len(e.prompt) for e in sample)
    by_length = [positions, *(expected_rounds(replays, k)[1] for k in lengths[1:])]  # plainly: a round for each token
    rounds = [float(each.sum()) for each in by_length]
    reading = model.draft(0, prompts)
    rates = [model.with_tokens(decoded / (rounds[k] * seconds[k] + (reading if k else 0.0))) for k in lengths]
    best = max(lengths, key=rates.__getitem__)

    def at(acceptance: float) -> tuple[int, float]:
        expected = (sum(acceptance**i for i in range(k + 1)) / seconds[k] for k in lengths)
        gains = [model.with_tokens(rate) / rates[0] for rate in expected]
        top = max(lengths, key=gains.__getitem__)
        return top, gains[top]

    interval = (1.0, 1.0)
    if best:
        models = [at_context(table) for table in repeats]
        interval = speed_up_interval(models, positions, by_length[best], best, rates[best] / rates[0])
    return Forecast(
        costs=costs,
        generations=len(replays),
        acceptance=acceptance_rate(replays),
        tokens_per_round=tuple(decoded / number for number in rounds),
        tokens_per_second=tuple(rates),
        draft_length=best,
        speed_up=rates[best] / rates[0],
        speed_up_interval=interval,
        break_even=next((a / STEPS for a in range(1, STEPS) if at(a / STEPS)[0] > 0), 1.0),
        by_acceptance=tuple((a / 10, *at(a / 10)) for a in range(1, 10)),
    )


def speed_up_interval(
    repeats: Sequence[CostModel],
    decoded: npt.NDArray[np.float64],
    rounds: npt.NDArray[np.float64],
    length: int,
    predicted: float,
) -> tuple[float, float]:
    """The 2.5th and 97.5th percentile of the speed-up at draft ``length`` that another run, over other texts, would
    measure.

    Generations (G,), with the tokens ``decoded`` in the ``rounds`` of each, are resampled with replacement. The
    machine in another run is assumed to differ from the mean of ``repeats`` as these differ from each other, with the
    tails of so small a sample (Student's t). A round takes at least as long as a plain step, so no speed-up exceeds the
    tokens of a round.
    """
    import numpy as np

    rng = np.random.default_rng(0)
    drawn = rng.integers(0, len(rounds), (RESAMPLES, len(rounds)))
    tokens = decoded[drawn].sum(1) / rounds[drawn].sum(1)
    middle = decoded.sum() / rounds.sum()
    gains = np.log([m.with_tokens(middle / m.round(length)) * (m.round(0) + m.token_s * m.speed) for m in repeats])
    off = np.zeros(RESAMPLES)
    if len(repeats) > 1:
        spread = gains.std(ddof=1) * (1 + 1 / len(gains)) ** 0.5
        off = spread * rng.standard_t(len(gains) - 1, RESAMPLES)
    found = np.minimum(predicted * tokens / middle * np.exp(off), tokens)
    low, high = np.percentile(found, (2.5, 97.5))
    return float(low), float(high)
