"""The database of convolutions: what goes in comes out, and what was not timed is never taken so."""

import dataclasses
import itertools
import json
import logging
import math

import pytest
from convolutions import convolution

from vmem_jax.conv.database import Database, Entry, identity_of
from vmem_jax.core.cards import CARDS
from vmem_jax.core.convolution import XLA, Convolution, Epilogue, Micro, Pass
from vmem_jax.profile.store import Measured, Store

HERE = identity_of("NVIDIA H200", "9.14.0")
FORWARD = convolution(64)
FILTER = dataclasses.replace(
    convolution(64, Pass.BACKWARD_FILTER),
    size=(8, 9, 10),
    kernel=(1, 2, 3),
    strides=(1, 1, 2),
    padding=((0, 1), (2, 2), (-1, 0)),
    dilation=(1, 2, 1),
    groups=2,
)
FAST = Micro(64, 5, ((3, 1), (12, 0)), 339738624, 0.556e-3)
SLOW = Micro(64, XLA, (), 0, 3e-3)
UNTIMED = Micro(64, 7, ((3, 1),), 100, math.nan)


@pytest.fixture
def database(tmp_path):
    return Database(HERE, tmp_path)


def same(a: Micro, b: Micro) -> bool:
    """Equality, with nan the same as nan."""
    return repr(a) == repr(b)


def test_what_goes_in_comes_out(database):
    padded = dataclasses.replace(FAST, channels=8, seconds=1e-3)  # a way of its own
    entries = {FORWARD: Entry((FAST, padded, SLOW), True), FILTER: Entry((SLOW,))}
    database.add(entries)
    assert database.load() == entries


def test_every_field_is_part_of_the_key(database):
    other = {
        "which": Pass.BACKWARD_DATA,
        "dtype": "bfloat16",
        "strict": True,
        "batch": 32,
        "features_in": 4,
        "features_out": 8,
        "size": (5, 5),
        "kernel": (1, 1),
        "strides": (2, 2),
        "padding": ((0, 0), (0, 1)),
        "dilation": (2, 2),
        "groups": 4,
        "channels_last": True,
        "epilogue": Epilogue.BIAS_RELU,
        "prologue": True,
    }
    assert other.keys() == {f.name for f in dataclasses.fields(Convolution)}
    base = dataclasses.replace(FORWARD, strict=False)
    keys = [base, *(dataclasses.replace(base, **{k: v}) for k, v in other.items())]
    for n, key in enumerate(keys):
        micro = Micro(key.batch, n, (), n, 1.0)
        database.add({key: Entry((micro,))})
    found = database.load()
    assert [found[key].micros[0].engine for key in keys] == list(range(len(keys)))


def test_people_can_read_it(database):
    database.add({FORWARD: Entry((FAST, UNTIMED))})
    content = json.loads(database.path.read_text())
    assert content["device"] == "NVIDIA H200" and content["versions"] == {"cudnn": "9.14.0"}
    entry = content["convolutions"][0]
    assert entry["convolution"]["which"] == "forward" and entry["convolution"]["kernel"] == [5, 5]
    assert entry["micros"][0] == {
        "engine": 5,
        "knobs": {"3": 1, "12": 0},
        "workspace": 339738624,
        "seconds": 0.556e-3,
        "channels": 0,
    }
    assert entry["micros"][1]["seconds"] is None and entry["complete"] is False


def test_what_was_not_timed_is_not_taken_for_timed(database):
    database.add({FORWARD: Entry((UNTIMED, FAST))})
    found = database.load()[FORWARD]
    assert found.timed == (FAST,)
    assert same(found.micros[1], UNTIMED)
    assert "NaN" not in database.path.read_text()


def test_a_time_takes_the_place_of_none_and_never_the_reverse(database):
    timed = dataclasses.replace(UNTIMED, seconds=1.0)
    for entries in ((UNTIMED, timed), (timed, UNTIMED)):
        for micro in entries:
            database.add({FORWARD: Entry((micro,))})
        assert database.load()[FORWARD].micros == (timed,)
    newer = dataclasses.replace(timed, seconds=2.0)
    database.add({FORWARD: Entry((newer,), complete=True)})
    database.add({FORWARD: Entry((SLOW,))})
    assert database.load()[FORWARD] == Entry((SLOW, newer), complete=True)


def test_it_lies_apart_from_the_profile(database, tmp_path):
    """The identity may be the same: they are two files."""
    store = Store(HERE, tmp_path)
    store.add(Measured(CARDS["h200"].machine))
    database.add({FORWARD: Entry((FAST,))})
    assert store.path != database.path
    assert store.load().machine and database.load()


@pytest.mark.parametrize("other", [identity_of("NVIDIA H200", "9.19.0"), identity_of("A100", "9")])
def test_another_device_or_cudnn_is_another_file(database, tmp_path, other):
    database.add({FORWARD: Entry((FAST,))})
    assert Database(other, tmp_path).load() == {}


def _entry(content):
    return content["convolutions"][0]


@pytest.mark.parametrize(
    "change, says",
    [
        (lambda c: c.update(format="vmem_jax profile"), "no database of convolutions"),
        (lambda c: c.update(schema=0), "schema 0"),
        (lambda c: c.update(device="NVIDIA A100"), "another device"),
        (lambda c: c["versions"].update(cudnn="9"), "other versions"),
        (lambda c: c.pop("convolutions"), "damaged"),
        (lambda c: c.update(convolutions={"a": 1}), "damaged"),
        (lambda c: _entry(c).pop("complete"), "damaged"),
        (lambda c: _entry(c).update(complete="yes"), "damaged"),
        (lambda c: _entry(c)["micros"][0].update(seconds=0), "damaged"),
        (lambda c: _entry(c)["micros"][0].update(seconds="fast"), "damaged"),
        (lambda c: _entry(c)["micros"][0].update(seconds=float("nan")), "damaged"),
        (lambda c: _entry(c)["micros"][0].pop("seconds"), "damaged"),
        (lambda c: _entry(c)["micros"][0].update(workspace=-1), "damaged"),
        (lambda c: _entry(c)["micros"][0].update(workspace=1.5), "damaged"),
        (lambda c: _entry(c)["micros"][0].update(engine=-2), "damaged"),
        (lambda c: _entry(c)["micros"][0].update(channels=-1), "damaged"),
        (lambda c: _entry(c)["micros"][0].pop("channels"), "damaged"),
        (lambda c: _entry(c)["micros"][0].update(knobs=[[1, 2]]), "damaged"),
        (lambda c: _entry(c)["micros"][0].update(knobs={"a": 2}), "damaged"),
        (lambda c: _entry(c)["convolution"].update(which="sideways"), "damaged"),
        (lambda c: _entry(c)["convolution"].update(batch=0), "damaged"),
        (lambda c: _entry(c)["convolution"].update(size=[8]), "damaged"),
        (lambda c: _entry(c)["convolution"].update(colour="red"), "damaged"),
        (lambda c: _entry(c)["convolution"].pop("groups"), "damaged"),
    ],
)
def test_a_file_that_is_not_what_it_should_be(database, caplog, change, says):
    database.add({FORWARD: Entry((FAST,))})
    content = json.loads(database.path.read_text())
    change(content)
    database.path.write_text(json.dumps(content))
    with caplog.at_level(logging.WARNING, logger="absl"):
        assert database.load() == {}
    assert says in caplog.text and str(database.path) in caplog.text
    database.add({FORWARD: Entry((SLOW,))})  # measured again
    assert database.load() == {FORWARD: Entry((SLOW,))}


def test_what_others_wrote_meanwhile_is_kept(tmp_path):
    """Writers in processes of their own are those of tests/profile/test_store.py."""
    writers = {1: Database(HERE, tmp_path), 2: Database(HERE, tmp_path)}
    for n, who in itertools.product(range(6), writers):
        # one convolution that both write to, and one of its own
        micro = Micro(64, 100 * who + n, (), n, 1.0 + n)
        writers[who].add({FORWARD: Entry((micro,)), convolution(100 * who + n + 1): Entry(())})
    found = Database(HERE, tmp_path).load()
    engines = {100 * who + n for who, n in itertools.product((1, 2), range(6))}
    assert {m.engine for m in found[FORWARD].micros} == engines
    assert len(found) == 13
