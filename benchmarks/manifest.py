"""The tables and figures of the papers, as the files of `tables/` have them: what a paper says, and
what is run for it.

A file has the paper's own figures with the section or table that gives them (none is read off a
plot), and `steps`: networks, dtypes, and variants as `policy?option=value@budget`, in the order in
which they tell the most. A variant may be the name of one of SUITES. Steps with `core = true` are the
least that makes the statement of the table.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from records import LEAST_OF

import vmem_jax

FOLDER = Path(__file__).parent / "tables"

SYSTEMS = ("vdnn", "vdnnpp", "modnn", "superneurons", "ucudnn")
"""The policies of the papers."""

SUITES: dict[str, tuple[str, ...]] = {
    "full": (
        "exact@none",
        *(f"{policy}@least" for policy in ("auto", *SYSTEMS[:-1])),
        *(f"auto@least:{policy}" for policy in SYSTEMS[:-1]),
        "checkpoint",
        "offload",
        *(f"{policy}@0.35" for policy in ("auto", *SYSTEMS)),
        *(f"{policy}@12GiB" for policy in ("auto", *SYSTEMS)),
    )
}
"""Variants that many networks have. What µ-cuDNN takes at the least is what plain jit does."""

LEARNING_RATE = 1e-5

WAYS = ("plain", "checkpoint", "offload", *vmem_jax.POLICIES)
"""What a variant begins with. What else a paper compares is called as it is there."""


@dataclasses.dataclass(frozen=True)
class Case:
    """What one row is of. Fields as those of `records.Record`."""

    model: str
    batch: int
    dtype: str
    variant: str
    asked: str = ""

    @property
    def network(self) -> str:
        return f"{self.model}:{self.batch}"

    @property
    def how(self) -> str:
        """The variant and its budget, as a file of `tables/` has them."""
        return f"{self.variant}@{self.asked}" if self.asked else self.variant

    @property
    def precision(self) -> str:
        """Float32 is strict: no TF32, as in the papers."""
        return "highest" if self.dtype == "float32" else ""


@dataclasses.dataclass(frozen=True)
class Published:
    """One figure of a paper.

    Attributes:
      of: the network and its batch, or what else it is of.
      how: the variant, in our names where we have it.
      what: the quantity, as `Table.compares` names ours.
      value: a number, or words where the paper has no number.
      unit: of the paper, not converted.
      at: the section or table that gives it.
    """

    of: str
    how: str
    what: str
    value: float | str
    unit: str
    at: str
    note: str = ""


@dataclasses.dataclass(frozen=True)
class Table:
    """One table or figure of a paper, and how it is made again.

    Attributes:
      name: of its file.
      paper, item, title: as "vDNN", "Figure 11", and what it shows.
      setup: what the paper measured on.
      compares: quantities: fields of `records.Record`, "seconds", "speed", or what `computed` gives.
      plot: the quantity that is drawn; "" for none.
      cases: rows to run, the most telling first.
      core: those of them that its statement needs.
      runs: whether they are; else `computed` plans them alone.
      below_plain: whether sizes that plain jit meets, too, are left out.
      scripts: further commands of this folder, with flags; they need the card.
      computed: the function of `computed.py` that calculates it; "" for none.
      layers: the prefix of the kernels that rows of `convolutions.py` are looked up by; "" for none.
      published: the paper's figures.
    """

    name: str
    paper: str
    item: str
    title: str
    setup: str
    compares: tuple[str, ...]
    plot: str
    cases: tuple[Case, ...]
    core: tuple[Case, ...]
    runs: bool
    below_plain: bool
    scripts: tuple[str, ...]
    computed: str
    layers: str
    published: tuple[Published, ...]


def show_how(how: str) -> str:
    """A variant and its budget for people: `vdnn?offload=all@0.5` as "vdnn, offload all, at 50%"."""
    variant, _, asked = how.partition("@")
    variant, techniques, _, density, *_ = [*variant.split(":"), "", "", ""]
    policy, _, query = variant.partition("?")
    if policy not in WAYS:
        return how
    options = [part.replace("=", " ").replace("_", " ") for part in query.split("&") if part]
    options += [techniques.replace("+", " and ")] if techniques else []
    options += [f"density {density}"] if density else []
    budget = {"": "", "none": "", "least": "its least"}.get(asked)
    if asked.startswith(LEAST_OF):
        budget = f"at the least of {asked.removeprefix(LEAST_OF)}"
    if budget is None:
        share = re.fullmatch(r"0?\.\d+", asked)
        budget = f"at {float(asked):.0%}" if share else f"in {asked.replace('GiB', ' GiB')}"
    return ", ".join(filter(None, [policy, *options, budget]))


def names() -> list[str]:
    return sorted(path.stem for path in FOLDER.glob("*.toml"))


def load(name: str) -> Table:
    """The table of that name. Raises ValueError if there is none, or its file is wrong."""
    if name not in names():
        raise ValueError(f"there is no table {name!r}; there is {', '.join(names())}.")
    data = tomllib.loads((FOLDER / f"{name}.toml").read_text())
    steps, published = data.pop("steps", []), data.pop("published", [])
    defaults: dict[str, Any] = {
        "plot": "",
        "runs": True,
        "below_plain": True,
        "scripts": [],
        "computed": "",
        "layers": "",
    }
    fields = {k: tuple(v) if isinstance(v, list) else v for k, v in (defaults | data).items()}
    try:
        core = tuple(step.pop("core", False) for step in steps)
        cases = [cases_of(**step) for step in steps]
        return Table(
            name=name,
            cases=tuple(dict.fromkeys(itertools.chain(*cases))),
            core=tuple(dict.fromkeys(itertools.chain(*itertools.compress(cases, core)))),
            published=tuple(figure for entry in published for figure in _published(**entry)),
            **fields,
        )
    except TypeError as error:
        raise ValueError(f"{name}.toml: {error}") from None


def cases_of(networks: Iterable[str], dtypes: Iterable[str], variants: Iterable[str]) -> list[Case]:
    expanded = [each for variant in variants for each in SUITES.get(variant, (variant,))]
    found = []
    for dtype in dtypes:
        for network in networks:
            model, batch = network.split(":")
            for each in expanded:
                variant, _, asked = each.partition("@")
                found.append(Case(model, int(batch), dtype, variant, asked))
    return found


def _published(
    what: str,
    unit: str,
    at: str,
    of: str = "",
    how: str = "",
    value: float | str | None = None,
    columns: Iterable[str] = (),
    rows: dict[str, Any] | None = None,
    note: str = "",
) -> Iterator[Published]:
    """One figure, or `rows` of them; a row stands for what is left out of `of` and `how`."""
    if value is not None:
        yield Published(of, how, what, value, unit, at, note)
    for key, entry in (rows or {}).items():
        place = (of, key) if of else (key, how)
        if not columns:
            yield Published(*place, what, entry, unit, at, note)
            continue
        for column, cell in zip(columns, entry, strict=True):
            if cell != "":
                yield Published(key, column, what, cell, unit, at, note)
