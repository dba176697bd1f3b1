"""inputs: what is known of the inputs of a step beside their types."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from vmem_jax import jax_compat as compat
from vmem_jax.capture.all_at_once import Whole
from vmem_jax.capture.hosted_updates import is_stack
from vmem_jax.capture.primitives import nbytes
from vmem_jax.capture.product_workspaces import UNKNOWN_PRODUCTS, Products
from vmem_jax.jax_compat import ClosedJaxpr


@dataclasses.dataclass(frozen=True)
class Inputs:
    """What is known of the inputs of a step.

    Attributes:
      names: the user's name of each, "state.params['conv1']['kernel']".
      donated: for each whether the caller gives it up.
      shardings: the `jax.sharding.Sharding` of each; none for those on one device.
      hosted: for each in host memory its index, and that of the output that goes there again.
      platform: "cpu" where XLA's CPU compiler compiles the step.
      products: how XLA computes matrix products.
    """

    names: tuple[str, ...] = ()
    donated: tuple[bool, ...] = ()
    shardings: tuple[Any, ...] = ()
    hosted: tuple[tuple[int, int | None], ...] = ()
    platform: str = ""
    products: Products = UNKNOWN_PRODUCTS

    @property
    def inside(self) -> Inputs:
        """The same for an iteration of a loop of the step."""
        return Inputs(platform=self.platform, products=self.products)

    def name(self, i: int) -> str:
        """The name of input `i`."""
        return self.names[i] if self.names else f"argument {i}"

    def whole(self, flat: ClosedJaxpr, why: Mapping[int, str]) -> tuple[Whole, ...]:
        """The stacks in host memory that come as a whole, by the reason that `why` gives for each.

        Args:
          flat: the step, before any of them is in host memory.
          why: of each input in host memory the reason; "" where it comes by slices.
        """
        size = lambda i: nbytes(compat.open_jaxpr(flat).invars[i].aval)
        found = []
        for reason in filter(None, dict.fromkeys(why.values())):
            same = [i for i, each in why.items() if each == reason and is_stack(flat, i)]
            names = map(self.name, sorted(same, key=size, reverse=True))
            if same:
                found.append(Whole(tuple(names), sum(map(size, same)), reason))
        return tuple(found)


UNKNOWN = Inputs()
"""Where nothing is known."""
