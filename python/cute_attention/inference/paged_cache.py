"""`PagedCache`: which pages belong to which sequence, on the host, and the pages themselves."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..checks import plain, type_name
from ..errors import OutOfPagesError

UNUSED = -1  # in a block table: no page


class CacheStep(NamedTuple):
    """What the calls of `attention_with_cache` of one step take, for all layers the same."""

    block_table: Tensor  # int32 [batch, pages]
    cache_seqlens: Tensor  # int32 [batch]: lengths before the step


@dataclass
class _Sequence:
    pages: list[int] = field(default_factory=list)
    length: int = 0


class PagedCache:
    """Keys and values of many sequences in pages that they share where they have a prefix in
    common.

    The bookkeeping is Python on the host and never waits for the device. `append` makes room for a
    step of all layers and returns the table and the lengths that `attention_with_cache` takes,
    which then writes the keys and values. `fork` makes a sequence that shares all pages of another;
    the first `append` to either copies the last page if it is partly filled. Not safe to change
    from several threads at once.

    Args:
        pages: how many there are.
        page_size: tokens of a page; for a kernel a multiple of 16.
        heads_kv: of keys and values.
        head_dim: of keys.
        head_dim_v: of values; head_dim where None.
        layers: each has pages of its own, by the same numbers.
        dtype: of the keys and values.
        device: where they lie.

    Raises:
        ValueError: a size that is not positive.

    Example:
        >>> import torch
        >>> from cute_attention.inference import PagedCache, attention_with_cache
        >>> cache = PagedCache(pages=8, page_size=16, heads_kv=2, head_dim=32)
        >>> first = cache.allocate()
        >>> q, k, v = torch.randn(1, 20, 4, 32), *torch.randn(2, 1, 20, 2, 32).unbind()
        >>> step = cache.append([first], 20)
        >>> out = attention_with_cache(q, cache.k[0], cache.v[0], step.cache_seqlens, k=k, v=v,
        ...                            block_table=step.block_table, causal=True)
        >>> second = cache.fork(first)
        >>> cache.free_pages, cache.length(second)
        (6, 20)
    """

    def __init__(
        self,
        pages: int,
        page_size: int,
        heads_kv: int,
        head_dim: int,
        head_dim_v: int | None = None,
        layers: int = 1,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> None:
        head_dim_v = head_dim if head_dim_v is None else head_dim_v
        sizes = {
            "pages": pages, "page_size": page_size, "heads_kv": heads_kv, "head_dim": head_dim,
            "head_dim_v": head_dim_v, "layers": layers,
        }  # fmt: skip
        for label, size in sizes.items():
            _check_count("PagedCache", label, size, least=1)
        shape = layers, pages, page_size, heads_kv
        # One entry per layer, [pages, page_size, heads_kv, head dim].
        self.k: tuple[Tensor, ...] = torch.zeros(
            *shape, head_dim, dtype=dtype, device=device
        ).unbind()
        self.v: tuple[Tensor, ...] = torch.zeros(
            *shape, head_dim_v, dtype=dtype, device=device
        ).unbind()
        self.page_size = page_size
        self._device = self.k[0].device
        self._users = [0] * pages  # of each page, how many sequences have it
        self._free = list(reversed(range(pages)))  # the last is taken next
        self._sequences: dict[int, _Sequence] = {}
        self._next = 0

    @property
    def free_pages(self) -> int:
        """How many pages belong to no sequence."""
        return len(self._free)

    def length(self, sequence: int) -> int:
        """How many tokens a sequence has."""
        return self._of("length", sequence).length

    def pages(self, sequence: int) -> tuple[int, ...]:
        """The pages of a sequence, in the order of its tokens."""
        return tuple(self._of("pages", sequence).pages)

    def allocate(self) -> int:
        """A new sequence without tokens, by the number that names it from now on."""
        number, self._next = self._next, self._next + 1
        self._sequences[number] = _Sequence()
        return number

    def fork(self, sequence: int) -> int:
        """A new sequence with the tokens of another, whose pages it shares."""
        parent = self._of("fork", sequence)
        number = self.allocate()
        self._sequences[number] = _Sequence(list(parent.pages), parent.length)
        for page in parent.pages:
            self._users[page] += 1
        return number

    def free(self, sequence: int) -> None:
        """Forgets a sequence. Pages that no other one shares are free again."""
        for page in self._of("free", sequence).pages:
            self._release(page)
        del self._sequences[sequence]

    def append(
        self, sequences: Sequence[int], tokens: int | Sequence[int], width: int | None = None
    ) -> CacheStep:
        """Makes room for new tokens of several sequences, and counts them as there.

        Args:
            sequences: each once.
            tokens: how many of each, or one number for all.
            width: the pages of a row of the table, for a CUDA graph of a fixed size; None for as
                many as the longest sequence has.

        Returns:
            The table of these sequences, whose unused entries are -1, and their lengths before the
            new tokens.

        Raises:
            OutOfPagesError: there are not as many free pages; nothing was changed.
            KeyError: there is no such sequence.
            ValueError: a sequence comes twice, a number is negative, or `width` is too small.
        """
        sequences = _listed("sequences", sequences)
        found = [self._of("append", sequence) for sequence in sequences]
        tokens = plain(tokens)
        counts = [tokens] * len(found) if isinstance(tokens, int) else _listed("tokens", tokens)
        if len(set(sequences)) != len(found):
            raise ValueError(
                f"PagedCache.append: sequences is {sequences}, expected each sequence once"
            )
        if len(counts) != len(found):
            raise ValueError(
                f"PagedCache.append: tokens is {counts}, expected {len(found)} numbers (one for "
                "each of sequences)"
            )
        for count in counts:
            _check_count("PagedCache.append", "tokens", count, least=0)
        if width is not None:
            width = plain(width)
            _check_count("PagedCache.append", "width", width, least=0)
        before = [each.length for each in found]
        after = [length + count for length, count in zip(before, counts, strict=True)]
        longest = max((-(-length // self.page_size) for length in after), default=0)
        if width is not None and width < longest:
            raise ValueError(
                f"PagedCache.append: width is {width}, expected at least {longest} (the pages of "
                "the longest sequence)"
            )
        self._make_room(found, counts)
        return CacheStep(
            self._table(found, longest if width is None else width),
            torch.tensor(before, dtype=torch.int32).to(self._device, non_blocking=True),
        )

    def _make_room(self, found: list[_Sequence], counts: list[int]) -> None:
        grown = [(each, count) for each, count in zip(found, counts, strict=True) if count]
        new = [-(-(e.length + n) // self.page_size) - len(e.pages) for e, n in grown]
        copies = self._pages_to_copy([each for each, _ in grown])
        needed = sum(new) + len(copies)
        if needed > len(self._free):
            raise OutOfPagesError(
                f"PagedCache.append: {needed} more pages are needed and {len(self._free)} of "
                f"{len(self._users)} are free (free sequences, or make the cache larger)"
            )
        for each in copies:
            each.pages[-1] = self._copied(each.pages[-1])
        for (each, count), pages in zip(grown, new, strict=True):
            each.pages += [self._take() for _ in range(pages)]
            each.length += count

    def _pages_to_copy(self, grown: Iterable[_Sequence]) -> list[_Sequence]:
        """The sequences whose last page is partly filled and shared. The last one of those that
        share a page may keep it."""
        users = list(self._users)
        copies = []
        for each in grown:
            if each.length % self.page_size and users[each.pages[-1]] > 1:
                users[each.pages[-1]] -= 1
                copies.append(each)
        return copies

    def _copied(self, page: int) -> int:
        """A copy of a page, which takes its place for one of its users."""
        copy = self._take()
        for layer in (*self.k, *self.v):
            layer[copy].copy_(layer[page])
        self._release(page)
        return copy

    def _table(self, found: list[_Sequence], width: int) -> Tensor:
        rows = [each.pages + [UNUSED] * (width - len(each.pages)) for each in found]
        table = torch.tensor(rows, dtype=torch.int32).reshape(len(found), width)
        return table.to(self._device, non_blocking=True)

    def _take(self) -> int:
        page = self._free.pop()
        self._users[page] = 1
        return page

    def _release(self, page: int) -> None:
        self._users[page] -= 1
        if not self._users[page]:
            self._free.append(page)

    def _of(self, method: str, sequence: int) -> _Sequence:
        if sequence not in self._sequences:
            raise KeyError(
                f"PagedCache.{method}: there is no sequence {sequence!r}, expected one that "
                "allocate or fork returned and that was not freed"
            )
        return self._sequences[sequence]


def _listed(label: str, values: Any) -> list[Any]:
    """A list of Python numbers where NumPy's or an array of them are given."""
    try:
        return [plain(value) for value in values]
    except TypeError:
        raise TypeError(
            f"PagedCache.append: {label} is {type_name(values)}, expected a list of ints"
        ) from None


def _check_count(name: str, label: str, value: object, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name}: {label} is {value!r}, expected an int >= {least}")
