"""Paired comparisons whose verdict can be yes, no, or not enough; all of it on scipy.stats."""

from .binary import binary_estimate
from .estimate import ALPHA, Estimate, Verdict, flip_bound, macro_flip_bound, needed_pairs, rule_of_three_pairs
from .many import benjamini_hochberg, holm
from .paired import Differences, macro_estimate, real_estimate, sign_flip_p

__all__ = [
    "ALPHA",
    "Differences",
    "Estimate",
    "Verdict",
    "benjamini_hochberg",
    "binary_estimate",
    "flip_bound",
    "holm",
    "macro_estimate",
    "macro_flip_bound",
    "needed_pairs",
    "real_estimate",
    "rule_of_three_pairs",
    "sign_flip_p",
]
