"""Loads that may still read shared memory when their warp arrives at an mbarrier, found in the
machine code of a kernel.

An arrival waits for no load. Where it tells the load warp that a buffer is free, TMA may write the
next data there before the load has read. So before the arrival the warp waits for the load's
result, or executes a fence.proxy.async (`end_reads()` in sm90/barrier.h).

An instruction whose result takes long names one of six scoreboards, and an instruction that needs
the result waits for it. NVIDIA documents neither; in the 128 bits of an instruction of sm_70 and
newer chips they are bits 110 to 112 (7: none) and, a bit for each scoreboard, bits 116 to 121.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

LOAD, FENCE, ARRIVAL = "LDSM", "FENCE.VIEW.ASYNC", "SYNCS.ARRIVE"
# Instructions that name a place where the warp may go on, and those after which it goes on nowhere
# else, where they have no predicate.
JUMPS, LEAVES = r"BRA|BSSY|CALL|WARPSYNC", r"BRA 0x|EXIT|RET"
NO_SCOREBOARD = 7

Pending = frozenset[tuple[int, int]]  # (scoreboard, address) of loads


@dataclass
class Instruction:
    address: int
    text: str  # without a predicate
    has_predicate: bool
    scoreboard: int = NO_SCOREBOARD  # that its result sets
    awaited: int = 0  # a bit for each scoreboard that it waits for
    next: list[int] = field(default_factory=list)  # addresses


LINE = re.compile(r"\s+/\*(\w{4,})\*/\s+(@!?U?P\w+ +)?(\S.*?) *; +/\* 0x\w{16} \*/")
SECOND_LINE = re.compile(r"\s+/\* 0x(\w{16}) \*/")


def read(lines: Iterable[str]) -> dict[int, Instruction]:
    """The instructions of a kernel by address, from the lines of cuobjdump -sass: one with the
    text and the lower half of the bits, and one with the upper half."""
    found: dict[int, Instruction] = {}
    last = None
    for line in lines:
        if match := LINE.match(line):
            last = Instruction(int(match[1], 16), match[3], match[2] is not None)
            found[last.address] = last
        elif last and (match := SECOND_LINE.match(line)):
            upper = int(match[1], 16)
            last.scoreboard, last.awaited = upper >> 46 & 7, upper >> 52 & 63
            last = None
    link(list(found.values()))
    return found


def link(instructions: list[Instruction]) -> None:
    """Says of each instruction which may be next."""
    addresses = {each.address for each in instructions}
    for each, following in zip(instructions, [*instructions[1:], None], strict=True):
        if re.match(JUMPS, each.text):
            targets = (int(number, 16) for number in re.findall(r"\b0x(\w+)", each.text))
            each.next = [target for target in targets if target in addresses]
        if following and (each.has_predicate or not re.match(LEAVES, each.text)):
            each.next.append(following.address)


def under_way(lines: Iterable[str]) -> list[tuple[str, str]]:
    """(arrival, load) for each load that may not have read when its warp arrives."""
    instructions = read(lines)
    if not any(each.text.startswith(LOAD) for each in instructions.values()):
        return []
    first = min(instructions)
    before: dict[int, Pending] = {first: frozenset()}
    waiting = deque([first])
    while waiting:
        each = instructions[waiting.popleft()]
        after = pending_after(each, before[each.address])
        for address in each.next:
            known = before.get(address)
            if known is None or not after <= known:
                before[address] = after | (known or frozenset())
                waiting.append(address)
    return [
        (each.text, instructions[load].text)
        for each in instructions.values()
        if each.text.startswith(ARRIVAL)
        for _, load in sorted(awaited(each, before.get(each.address, frozenset())))
    ]


def awaited(instruction: Instruction, pending: Pending) -> Pending:
    """Those of the loads for which an instruction does not wait."""
    return frozenset(load for load in pending if not instruction.awaited >> load[0] & 1)


def pending_after(instruction: Instruction, pending: Pending) -> Pending:
    if instruction.text.startswith(FENCE):
        return frozenset()
    pending = awaited(instruction, pending)
    if instruction.text.startswith(LOAD):
        pending |= {(instruction.scoreboard, instruction.address)}
    return pending
