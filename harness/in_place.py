"""Results that are arguments: a pool of states that a kernel writes, and what it leaves of everything else in it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

Bind = Callable[[dict[str, Any]], Callable[[], Any]]


def completing(bind: Bind, results: tuple[str, ...], in_place: tuple[str, ...]) -> Bind:
    """A binding whose answers hold the arguments that were written in place, whether the kernel hands them out or not.

    Args:
        bind: Of a kernel.
        results: Names of all results, in order.
        in_place: Those that are arguments.
    """
    if not in_place:
        return bind

    def bind_whole(arguments: dict[str, Any]) -> Callable[[], Any]:
        run = bind(arguments)
        return lambda: _completed(run(), arguments, results, in_place)

    return bind_whole


def _completed(returned: Any, arguments: dict[str, Any], results: tuple[str, ...], in_place: tuple[str, ...]) -> Any:
    own = (returned,) if isinstance(returned, Tensor) else returned
    if not isinstance(own, tuple) or len(own) != len(results) - len(in_place):
        return returned
    fresh = iter(own)
    return tuple(arguments[name] if name in in_place else next(fresh) for name in results)


def is_argument(tensor: Tensor, argument: Tensor) -> bool:
    """Whether a result is the argument itself."""
    place, other = ((one.data_ptr(), one.shape, one.stride(), one.dtype) for one in (tensor, argument))
    return place == other


@contextmanager
def put_back(arguments: dict[str, Any], names: tuple[str, ...]) -> Iterator[None]:
    """Undo what the block did to these arguments."""
    before = {name: arguments[name].clone() for name in names}
    yield
    for name, value in before.items():
        arguments[name].copy_(value)
