"""Kinds and levels of noise on texts; without torch, for `cdt-fast --help`."""

from __future__ import annotations

DISTRIBUTIONS = ("gaussian", "laplace", "uniform")
TOKEN_KINDS = ("drop", "swap")
KINDS = (*DISTRIBUTIONS, *TOKEN_KINDS)
GAMMAS = tuple(0.25 * step for step in range(9))  # 0 to 2, over which the paper's AUC is taken
