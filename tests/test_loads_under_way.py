"""Loads of shared memory that an arrival at an mbarrier does not wait for are found in SASS."""

from __future__ import annotations

import pytest

from loads_under_way import NO_SCOREBOARD, under_way

LOAD = "LDSM.16.M88.4 R20, [R20]"
ARRIVAL = "SYNCS.ARRIVE.TRANS64.A1T0 RZ, [UR36+0x381b0], RZ"
FENCE = "FENCE.VIEW.ASYNC.S"
ADD = "FFMA.FTZ R4, R20, R35, R4"
END = ("EXIT", NO_SCOREBOARD, 0)


def sass(*instructions: tuple[str, int, int]) -> list[str]:
    """Lines as cuobjdump prints them, of (text, scoreboard of the result, scoreboards awaited)."""
    lines = []
    for number, (text, scoreboard, awaited) in enumerate(instructions):
        bits = scoreboard << 46 | awaited << 52
        lines.append(f"        /*{16 * number:04x}*/    {text} ;    /* 0x{number:016x} */")
        lines.append(f"                                     /* 0x{bits:016x} */")
    return lines


def plain(text: str, awaited: int = 0) -> tuple[str, int, int]:
    return (text, NO_SCOREBOARD, awaited)


@pytest.mark.parametrize(
    ("between", "expected"),
    [
        ([], [(ARRIVAL, LOAD)]),
        ([plain(ADD)], [(ARRIVAL, LOAD)]),
        ([plain(ADD, 1 << 2)], []),
        ([plain(ADD, 1 << 3)], [(ARRIVAL, LOAD)]),  # waits for another result
        ([plain(FENCE)], []),
        ([plain("@P0 BRA 0x40"), plain(FENCE)], [(ARRIVAL, LOAD)]),  # around the fence
        ([plain("BRA 0x40"), plain(FENCE)], [(ARRIVAL, LOAD)]),
        ([plain("BRA.U !UP0, 0x40"), plain(ADD, 1 << 2)], [(ARRIVAL, LOAD)]),
    ],
)
def test_what_stands_between_a_load_and_an_arrival(between, expected):
    lines = sass(plain("NOP"), (LOAD, 2, 0), *between, plain(f"@!P2 {ARRIVAL}"), END)
    assert under_way(lines) == expected


def test_an_arrival_may_wait_itself():
    assert under_way(sass((LOAD, 5, 0), plain(ARRIVAL, 1 << 5), END)) == []


def test_a_loop():
    """The load of one pass is under way at the arrival of the next."""
    loop = [plain("NOP"), plain(ARRIVAL), (LOAD, 0, 0), plain("@P0 BRA 0x10"), END]
    assert under_way(sass(*loop)) == [(ARRIVAL, LOAD)]
    loop[3] = plain("@P0 BRA 0x10", 1)
    assert under_way(sass(*loop)) == []


def test_what_no_warp_comes_to():
    assert under_way(sass(END, (LOAD, 0, 0), plain(ARRIVAL), END)) == []


def test_a_load_of_numbers_that_threads_wrote_is_none():
    """Those who write there next do so by stores, which the arrival orders."""
    assert under_way(sass(("LDS.128 R12, [UR9]", 0, 0), plain(ARRIVAL), END)) == []
