"""Plan: the schedule of one Program. It is saved as JSON and valid for that program only."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import Any

from vmem_jax.core.convolution import Configuration, Epilogue, Micro
from vmem_jax.core.program import LoopSegments, Program
from vmem_jax.errors import PlanError, show_nbytes

FORMAT = 20
"""Version of the saved form. Plans of other versions are refused."""


@dataclasses.dataclass(frozen=True, slots=True, order=True)
class Transfer:
    """A buffer that waits in host memory between two of its uses.

    It has four positions in `Plan.order`, in ascending order; each takes effect before the step at
    that position. The buffer's memory is free from `gone` to `fetch`. A hosted input is only fetched:
    its `start` and `gone` are 0. A hosted output is only offloaded: its `fetch` and `back` are the
    end of the order.

    Attributes:
      buffer: the buffer, with its value at `start`.
      start: the copy to the host begins.
      gone: the compute lane waits for that copy; the memory is free.
      fetch: the memory is allocated again and the copy to the device begins.
      back: the compute lane waits for that copy.
    """

    buffer: int
    start: int
    gone: int
    fetch: int
    back: int


def points_at(program: Program, transfers: Sequence[Transfer]) -> dict[int, list[tuple[int, int]]]:
    """Position -> the points before its step, in order, as pairs (point, index of the transfer).

    The points are 0 for `start`, 1 for `gone`, 2 for `fetch` and 3 for `back`. A hosted input has
    only the last two, a hosted output only the first two. Starts come first and `back` last, except
    that if a buffer returns and leaves again before the same step, all points of the first transfer
    come before those of the second.
    """
    at: dict[int, list[tuple[int, int, int]]] = {}
    backs: dict[tuple[int, int], int] = {}  # (buffer, position) -> its transfers that end there
    for i, t in sorted(enumerate(transfers), key=lambda each: each[1].start):
        comes, leaves = t.buffer in program.streamed_in, t.buffer in program.streamed_out
        for point, position in enumerate((t.start, t.gone, t.fetch, t.back)):
            if not (comes and point < 2) and not (leaves and point >= 2):
                after = backs.get((t.buffer, position), 0)
                at.setdefault(position, []).append((after, point, i))
        backs[t.buffer, t.back] = backs.get((t.buffer, t.back), 0) + 1
    return {p: [(point, i) for _, point, i in sorted(events)] for p, events in at.items()}


def form_of(one: Program | Plan) -> Hashable:
    """What distinguishes the forms of a step, but for sub-batches and compression: programs of
    several forms may be equal, of other jaxprs."""
    loops = one.kept, one.segments, one.opened
    return *loops, one.logit_chunks, one.carried, one.summed, one.pooled, one.bits


@dataclasses.dataclass(frozen=True)
class Plan:
    """The schedule of one Program.

    Attributes:
      program: `Program.fingerprint` of the step that it was made for.
      policy: the name of the policy that made it.
      order: the steps in execution order. A step that appears again is recomputed at that position
        from what is live there. A buffer dies after its last read before it is written again.
      fenced: whether `rewrite` holds XLA to `order`; false for an untouched program.
      budget: bytes, or None.
      predicted_peak: the most live bytes, by `simulate` on `core.planned.planned_program`. XLA's heap
        needs more: `core.planned.predicted_need`.
      predicted_seconds: seconds of one step, by the same simulation.
      transfers: which buffers wait in host memory, and when.
      looped: stacks that leave slice by slice in the loop that makes them, and return in the loop
        that reads them.
      convolutions: pairs (step, configuration). A convolution that is not listed runs as XLA's own,
        with a workspace that is not known.
      sub_batches: how often the steps on samples run, each time for a part of the batch.
      opened: whether these are the iterations of a loop, as `Program` has it.
      options: the compiler's options beside those of every step, as pairs (name, whether it is on).
      compressed, kept, segments, logit_chunks, sub_batch_size: the same fields of the program that it
        was made for.
      carried, summed, pooled, row_kernels, bits: the same.
    """

    program: str
    policy: str
    order: tuple[int, ...]
    fenced: bool
    budget: int | None
    predicted_peak: int
    predicted_seconds: float
    transfers: tuple[Transfer, ...] = ()
    looped: tuple[int, ...] = ()
    convolutions: tuple[tuple[int, Configuration], ...] = ()
    sub_batches: int = 1
    compressed: tuple[tuple[int, int], ...] = ()
    kept: tuple[tuple[int, ...], ...] | None = None
    segments: LoopSegments = None
    opened: bool = False
    logit_chunks: int = 1
    carried: tuple[int, ...] = ()
    summed: int = 0
    pooled: int = 0
    row_kernels: int = 0
    bits: bool = False
    sub_batch_size: int | None = None
    options: tuple[tuple[str, bool], ...] = ()

    @property
    def moves(self) -> bool:
        """Whether anything waits in host memory, which takes an arena."""
        return bool(self.transfers or self.looped)

    @property
    def divided(self) -> tuple[tuple[int, Configuration], ...]:
        """The convolutions that do not run as XLA's own."""
        return tuple((s, each) for s, each in self.convolutions if not each.is_xlas)

    @property
    def schedule(self) -> Hashable:
        """Equal for plans that do the same, whatever they were planned for and measured to take."""
        calls = tuple((s, configuration.calls) for s, configuration in self.divided)
        moved = self.transfers, self.looped
        return self.program, self.order, *moved, calls, self.fenced, self.options

    @property
    def recomputed(self) -> tuple[int, ...]:
        """The steps that run again, once for each repetition."""
        seen: set[int] = set()
        again = []
        for s in self.order:
            if s in seen:
                again.append(s)
            seen.add(s)
        return tuple(again)

    def __str__(self) -> str:
        budget = "no budget" if self.budget is None else f"budget {show_nbytes(self.budget)}"
        moved = f", {len(self.transfers)} buffers moved" if self.transfers else ""
        moved += f", {len(self.looped)} stacks moved by slices" if self.looped else ""
        convolutions = len(self.divided)
        moved += f", {convolutions} convolutions in micro-batches" if convolutions else ""
        parts = "iterations planned inside" if self.opened else "sub-batches"
        moved += f", {self.sub_batches} {parts}" if self.sub_batches > 1 else ""
        moved += f" of {self.sub_batch_size} samples" if self.sub_batch_size else ""
        moved += f", {len(self.compressed)} buffers compressed" if self.compressed else ""
        moved += f", {len(self.kept)} loops with other stacks" if self.kept else ""
        every = ["/".join(map(str, own)) for own, _ in self.segments or () if own]
        moved += f", in segments of {', '.join(every)} iterations" if every else ""
        moved += f", logits in {self.logit_chunks} chunks" if self.logit_chunks > 1 else ""
        moved += ", masks in bits" if self.bits else ""
        moved += "".join(f", {name}={value}" for name, value in self.options)
        count = len(self.carried)
        moved += f", {count} convolutions with what stands around them" if count else ""
        moved += f", {self.summed} passes for several sums each" if self.summed else ""
        moved += f", {self.pooled} max-pools with their index" if self.pooled else ""
        moved += f", {self.row_kernels} kernels of rows" if self.row_kernels else ""
        return (
            f"Plan({self.policy}, {budget}: predicted {show_nbytes(self.predicted_peak)}, "
            f"{self.predicted_seconds * 1e3:.2f} ms, {len(self.order)} steps, "
            f"{len(self.recomputed)} of them recomputed{moved})"
        )

    def to_json(self) -> str:
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        transfers = [dataclasses.astuple(t) for t in self.transfers]
        return json.dumps(
            {
                "format": FORMAT,
                **fields,
                "order": list(self.order),
                "transfers": transfers,
                "looped": list(self.looped),
                "convolutions": [
                    [s, each.epilogue, [dataclasses.astuple(m) for m in each.micros]]
                    for s, each in self.convolutions
                ],
            }
        )

    def save(self, path: str | Path) -> None:
        """Writes the plan as JSON, whole or not at all."""
        path = Path(path)
        partial = path.with_name(path.name + ".partial")
        partial.write_text(self.to_json() + "\n")
        partial.replace(path)

    @classmethod
    def from_json(cls, text: str, name: str = "plan") -> Plan:
        """The plan of `text`.

        Raises:
          PlanError: it is no JSON (cut off or edited), of another format version, or lacks fields.
        """
        try:
            raw: Any = json.loads(text)
        except json.JSONDecodeError as e:
            raise PlanError(
                f"`{name}` is no whole plan: {e.msg} at character {e.pos} of {len(text)}. "
                "It was cut off or edited; make it again with `.plan(...).save(...)`."
            ) from None
        if not isinstance(raw, dict) or raw.get("format") != FORMAT:
            got = raw.get("format") if isinstance(raw, dict) else type(raw).__name__
            raise PlanError(
                f"`{name}` has plan format {got!r}; this version of vmem_jax reads {FORMAT}. "
                "Make the plan again."
            )
        expected = {f.name: f for f in dataclasses.fields(cls)}
        missing, extra = set(expected) - set(raw), set(raw) - set(expected) - {"format"}
        if missing or extra:
            raise PlanError(
                f"`{name}` is damaged: missing fields {sorted(missing)}, unknown {sorted(extra)}."
            )
        values = {k: raw[k] for k in expected}
        expected_types = {
            "program": isinstance(values["program"], str),
            "policy": isinstance(values["policy"], str),
            "order": isinstance(values["order"], list) and all(map(_is_int, values["order"])),
            "fenced": isinstance(values["fenced"], bool),
            "budget": values["budget"] is None or _is_int(values["budget"]),
            "predicted_peak": _is_int(values["predicted_peak"]),
            "predicted_seconds": _is_int(values["predicted_seconds"])
            or isinstance(values["predicted_seconds"], float),
            "transfers": _are_integers(values["transfers"], 5),
            "looped": isinstance(values["looped"], list) and all(map(_is_int, values["looped"])),
            "convolutions": isinstance(values["convolutions"], list)
            and all(map(_is_configured, values["convolutions"])),
            "sub_batches": _is_int(values["sub_batches"]) and values["sub_batches"] > 0,
            "logit_chunks": _is_int(values["logit_chunks"]) and values["logit_chunks"] > 0,
            "carried": isinstance(values["carried"], list) and all(map(_is_int, values["carried"])),
            "summed": _is_int(values["summed"]) and values["summed"] >= 0,
            "pooled": _is_int(values["pooled"]) and values["pooled"] >= 0,
            "row_kernels": _is_int(values["row_kernels"]) and values["row_kernels"] >= 0,
            "bits": isinstance(values["bits"], bool),
            "opened": isinstance(values["opened"], bool),
            "sub_batch_size": values["sub_batch_size"] is None
            or (_is_int(values["sub_batch_size"]) and values["sub_batch_size"] > 0),
            "options": isinstance(values["options"], list)
            and all(map(_is_option, values["options"])),
            "compressed": _are_integers(values["compressed"], 2),
            "kept": values["kept"] is None or _are_lists_of_integers(values["kept"]),
            "segments": values["segments"] is None
            or (isinstance(values["segments"], list) and all(map(_is_divided, values["segments"]))),
        }
        wrong = [field for field, ok in expected_types.items() if not ok]
        if wrong:
            raise PlanError(f"`{name}` is damaged: {', '.join(wrong)} of the wrong type.")
        transfers = tuple(Transfer(*t) for t in values["transfers"])
        order, looped = tuple(values["order"]), tuple(values["looped"])
        convolutions = tuple(
            (s, Configuration(tuple(map(_micro, micros)), Epilogue(epilogue)))
            for s, epilogue, micros in values["convolutions"]
        )
        compressed = tuple((b, nbytes) for b, nbytes in values["compressed"])
        kept, segments = values["kept"], values["segments"]
        parts: dict[str, Any] = {"order": order, "transfers": transfers, "looped": looped}
        parts |= {"compressed": compressed, "carried": tuple(values["carried"])}
        parts["kept"] = None if kept is None else tuple(map(tuple, kept))
        divided = lambda every, stacked: (tuple(every), tuple(stacked))
        parts["segments"] = None if segments is None else tuple(divided(*own) for own in segments)
        parts["options"] = tuple((name, value) for name, value in values["options"])
        return cls(**{**values, **parts, "convolutions": convolutions})

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """The plan saved at `path`. Raises PlanError for a damaged or foreign file."""
        try:
            text = Path(path).read_text(encoding="utf-8")
        except UnicodeDecodeError:
            raise PlanError(f"`{path}` is no saved plan: it is not text.") from None
        return cls.from_json(text, str(path))


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _are_integers(saved: Any, count: int) -> bool:
    """Whether `saved` is a list of lists of `count` integers each."""
    return _are_lists_of_integers(saved) and all(len(each) == count for each in saved)


def _are_lists_of_integers(saved: Any) -> bool:
    return isinstance(saved, list) and all(
        isinstance(each, list) and all(map(_is_int, each)) for each in saved
    )


def _is_option(saved: Any) -> bool:
    """Whether `saved` is the name of an option, and whether it is on."""
    types = [type(each) for each in saved] if isinstance(saved, list) else []
    return types == [str, bool]


def _is_divided(saved: Any) -> bool:
    """Whether `saved` is how one pair of loops is divided."""
    return _are_lists_of_integers(saved) and len(saved) == 2


def _is_configured(saved: Any) -> bool:
    """Whether `saved` is a step and its configuration."""
    try:
        s, epilogue, micros = saved
        return type(s) is int and bool([_micro(m) for m in micros]) and epilogue in list(Epilogue)
    except (TypeError, ValueError):
        return False


def _micro(raw: Any) -> Micro:
    """The saved micro-configuration `raw`. Raises TypeError or ValueError if it is none."""
    batch, engine, knobs, workspace, seconds, channels, bare = raw
    whole = (batch, engine, workspace, channels, *(n for knob in knobs for n in knob))
    wrong = any(type(n) is not int for n in whole) or type(seconds) not in (int, float)
    if wrong or type(bare) is not bool:
        raise TypeError("a micro-configuration of other types")
    knobs = tuple((k, v) for k, v in knobs)
    return Micro(batch, engine, knobs, workspace, seconds, channels, bare)


def keep_plan(program: Program, budget: int | None, peak: int, seconds: float) -> Plan:
    """The plan that leaves `program` as it is."""
    return Plan(
        program=program.fingerprint,
        policy="keep",
        order=tuple(range(len(program.steps))),
        fenced=False,
        budget=budget,
        predicted_peak=peak,
        predicted_seconds=seconds,
        sub_batches=program.sub_batches,
        compressed=program.compressed,
        kept=program.kept,
        segments=program.segments,
        opened=program.opened,
        logit_chunks=program.logit_chunks,
        carried=program.carried,
        summed=program.summed,
        pooled=program.pooled,
        row_kernels=program.row_kernels,
        bits=program.bits,
        sub_batch_size=program.sub_batch_size,
    )
