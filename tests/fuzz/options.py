"""Random arguments of `vmem_jax.jit` for a program, drawn from its seed."""

from __future__ import annotations

import dataclasses
from typing import Any

from vmem_jax.core.cards import CARDS
from vmem_jax.core.machine import Machine
from vmem_jax.policy import POLICIES
from vmem_jax.techniques.jit_arguments import TECHNIQUES

from . import VERSION
from .layers import Draw

MODES = ("call",) * 14 + ("plan", "plan", "explain", "explain", "shapes", "inner")

QUICK = "quick"
"""A machine that starts kernels in no time. On a card hardly any batch of these programs is divided:
its parts take less time than it takes to start a kernel."""


@dataclasses.dataclass(frozen=True)
class Options:
    """One way to call the library.

    Attributes:
      share: the budget, as a share of what `of` says.
      form: how the budget is handed over: "bytes", "share" or "text".
      mode: what else is done: "call" runs the step; "plan" saves its plan, loads it and runs by that;
        "explain" prints what was decided; "shapes" plans from shapes first; "inner" calls the step
        in another jit.
      jit: keyword arguments, as JSON can hold them.
      of: "need": of all that plain jit needs, which may be below what no plan frees. "room": of what
        it needs beside that, which the budget has on top.
    """

    share: float
    form: str
    mode: str
    jit: dict[str, Any]
    of: str = "need"

    def keywords(self, need: int, floor: int) -> dict[str, Any]:
        """The arguments of `vmem_jax.jit`.

        Args:
          need: bytes that plain jit needs.
          floor: bytes of them that no plan frees.
        """
        more = dict(self.jit)
        if "machine" in more:
            more["machine"] = _machine(more["machine"])
        nbytes, share = self.nbytes(need, floor), self._share(need, floor)
        budget = {"bytes": nbytes, "share": share, "text": f"{nbytes}B"}[self.form]
        return {**more, "budget": budget}

    def nbytes(self, need: int, floor: int) -> int:
        """The budget in bytes."""
        return max(int(self._share(need, floor) * need), 1)

    def _share(self, need: int, floor: int) -> float:
        """The budget, as a share of plain jit's need."""
        if self.of == "need" or not need:
            return self.share
        return min((floor + self.share * (need - floor) + 0.5) / need, 1.0)


def _machine(name: str) -> Machine:
    if name == QUICK:
        return dataclasses.replace(CARDS["h200"].machine, launch=1e-12)
    return CARDS[name].machine


def draw_options(seed: int, index: int, transport: str = "any") -> Options:
    """The options number `index` of the program of `seed`.

    Args:
      transport: "any", or the one that every program gets.
    """
    draw = Draw(VERSION, seed, 10_000 + index)
    others = [name for name in POLICIES if name != "auto"]
    policy = "auto" if draw.chance(0.5) else draw.one(others)
    more: dict[str, Any] = {"policy": policy}
    needs = POLICIES[policy].needs
    if draw.chance(0.5 if policy == "auto" else 0.2):
        allow = {*draw.some(["order", "recompute", "offload", "stream", "sub_batches"])}
        allow |= {name for name in ("workspace", "compress") if draw.chance(0.15)}
        if draw.chance(0.9):
            allow |= {*needs}
        more["allow"] = tuple(name for name in TECHNIQUES if name in allow)
        if "compress" in allow and draw.chance(0.8):
            more["density"] = 0.5
    drawn = draw.one(["auto", "auto", "ffi", "ffi", "memory_kinds"])
    more["transport"] = drawn if transport == "any" else transport
    if (donated := draw.one([(), (), (0,), (0, 1), (0, 1, 2)])) != ():
        more["donate_argnums"] = donated
    if draw.chance(0.08):
        more["sub_batches"] = draw.one([1, 2, 4])
    if draw.chance(0.1):
        more["batch_argnums"] = (2, 3)
    if draw.chance(0.08):
        more["host_budget"] = draw.one(["4KiB", "64KiB", "1GiB"])
    if draw.chance(0.3):
        more["machine"] = draw.one([*sorted(CARDS), *[QUICK] * 2 * len(CARDS)])
    if draw.chance(0.03):
        more["tune"] = True
    return Options(
        share=round(draw.between(*draw.one([(0.25, 1.0), (0.6, 1.0)])), 3),
        form=draw.one(["bytes", "bytes", "bytes", "share", "text"]),
        mode=draw.one(MODES),
        jit=more,
        of="room" if draw.chance(0.8) else "need",
    )
