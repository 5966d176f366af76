"""Lets work that nobody wants any more end early, between two modules of a network.

On a CPU a solve takes a second: who stops a stream, or takes its page away, is not to heat the room for so long.
"""

from collections.abc import Callable, Iterable

from torch import nn


class Abandoned(BaseException):
    """The work was given up. No error of anybody's, so that it passes by those who handle errors."""


def ask_before(modules: Iterable[nn.Module], is_wanted: Callable[[], bool]) -> None:
    """Before each run of one of these modules `is_wanted` is asked; where it says no the run ends with Abandoned."""

    def ask(module: nn.Module, inputs: object) -> None:
        if not is_wanted():
            raise Abandoned

    for module in modules:
        module.register_forward_pre_hook(ask)
