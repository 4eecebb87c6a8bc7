"""Every pair of values that can meet does."""

import itertools

from pairwise import pairwise


def test_every_pair_that_is_allowed_meets():
    axes = ("abc", [1, 2, 3, 4], [True, False], "xy")

    def allowed(letter, number, flag, last):
        return not (letter == "a" and number == 4) and not (flag and last == "y")

    chosen = pairwise(*axes, allowed=allowed)
    everything = [values for values in itertools.product(*axes) if allowed(*values)]
    for one, other in itertools.combinations(range(4), 2):
        assert {(v[one], v[other]) for v in chosen} == {(v[one], v[other]) for v in everything}
    assert set(chosen) <= set(everything) and len(chosen) < len(everything) / 2
