"""All pairs of values instead of all combinations: most faults need one value, or two that meet."""

import itertools


def pairwise(*axes, allowed=lambda *values: True) -> list[tuple]:
    """Few of the allowed combinations, in which every pair of values of two axes is that some allowed one has.

    Args:
        axes: the values of each parameter.
        allowed: what may be combined, a function of one value of each axis.
    """
    left = [values for values in itertools.product(*axes) if allowed(*values)]

    def pairs(values):
        return set(itertools.combinations(enumerate(values), 2))

    missing, chosen = set().union(*map(pairs, left)), []
    while missing:
        best = max(left, key=lambda values: len(missing & pairs(values)))
        missing -= pairs(best)
        chosen.append(best)
    return chosen
