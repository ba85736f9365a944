"""How much better a session did than its group; numpy only.

The unit is the session. A session that was built into many traces counts once in its group's mean
and gives all of its traces the same advantage; were traces averaged, a chatty session would weigh
more in the very baseline that it is judged against, and the choice of builder would change the
objective. Sessions without a reward are left out before this point.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from tugline.trainers.grpo.config import Estimator

Rewards = npt.NDArray[np.float64]
"""One number per session of a group, shape ``(n,)``."""


def group_advantages(rewards: Rewards, estimator: Estimator, eps: float) -> Rewards:
    """Advantage of each session of one group; all zero where all rewards are equal.

    - ``grpo``: ``(r - mean) / (std + eps)`` with the population's std (arXiv 2402.03300)
    - ``dr_grpo``: ``r - mean``, which does not favour easy and hard groups (arXiv 2503.20783)
    - ``rloo``: ``r - mean of the others``, an unbiased baseline (arXiv 2402.14740)
    """
    if not has_signal(rewards):
        return np.zeros_like(rewards)
    centred: Rewards = rewards - rewards.mean()
    if estimator == "grpo":
        centred /= rewards.std() + eps
    elif estimator == "rloo":
        centred *= len(rewards) / (len(rewards) - 1)
    return centred


def has_signal(rewards: Rewards) -> bool:
    """Whether any session of the group did better than another."""
    return len(rewards) > 1 and bool(np.ptp(rewards) > 0)
