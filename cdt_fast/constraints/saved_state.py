"""What a saved state of the constraints must be, before any of it is restored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from cdt_fast.checks import check_integer
from cdt_fast.errors import InputError


def check_state(
    state: Mapping[str, Any], settings: Mapping[str, Any], counters: Sequence[str], tensors: Mapping[str, Tensor]
) -> None:
    """Require `state` to hold these settings, counters, and tensors of these shapes with finite numbers.

    Raises:
        InputError: a setting differs, an entry is missing, unknown, of the wrong shape or not finite, or a counter is
            none.
    """
    # Settings first: another rule has other tensors too, and its name is what the reader needs to see.
    for name, here in settings.items():
        if name in state and state[name] != here:
            raise InputError(f"the saved state has {name} = {state[name]}; expected {here}, as constructed here")
    expected = {*settings, *counters, *tensors}
    if expected != set(state):
        raise InputError(
            f"the saved state lacks {sorted(expected - set(state))} and has the unknown "
            f"{sorted(set(state) - expected)}; expected what state_dict() returned (what another version saved cannot "
            "be resumed: train again)"
        )
    for name, tensor in tensors.items():
        saved = state[name]
        if not isinstance(saved, Tensor) or saved.shape != tensor.shape:
            raise InputError(f"the saved {name} is {saved!r}; expected a tensor of shape {list(tensor.shape)}")
        # Sums of losses may be infinite: an update looks at them before it uses them.
        if name != "accumulated" and not bool(saved.isfinite().all()):
            raise InputError(f"the saved {name} is {saved.tolist()}; expected finite numbers")
    for name in counters:
        check_integer(f"the saved {name}", state[name], 0)
