"""Layouts that are broken on purpose: C++ traits that the exporter compiles instead of a kernel's.
Here are those of sm80; those of sm90 are in layout_mutations_sm90.py.

Each of them is the real traits with one thing changed. With it stand the rules of `check` that must
be violated.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutation:
    """C++ members that hide members of the kernel's traits, and the rules that they violate."""

    name: str
    members: str
    violated: frozenset[tuple[str, str]]  # (rule, first word of its subject)
    operands: str = ""  # C++ members that hide members of sm80::ForwardOperands or BackwardOperands

    @property
    def traits(self) -> str:
        """The name of the broken traits in C++."""
        return "Broken_" + self.name.replace(" ", "_")

    @property
    def kernels(self) -> str:
        """The name of the template in C++ that lists the kernel with the broken traits."""
        return f"Kernels_of_{self.traits}"

    def preamble(self, base: str, adapter: str) -> str:
        """The C++ text that defines the broken traits of a kernel, from its traits `base`, and the
        kernel as `adapter` describes it."""
        broken = (
            f"template <class Row> struct {self.traits} : {base}<Row> {{\n"
            f"  using Base = {base}<Row>; using Element = typename Base::Element;\n"
            f"{self.members}}};\n"
        )
        if self.operands:
            operands = base.replace("Traits", "Operands")
            broken += (
                f"template <class Row> struct {operands}<{self.traits}<Row>>\n"
                f"    : {operands}<{base}<Row>> {{\n"
                f"  using Traits = {base}<Row>; using Base = {operands}<Traits>;\n"
                f"{self.operands}}};\n"
            )
        listed = f"layouts::Kernels<layouts::{adapter}<{self.traits}<Row>>>"
        return f"{broken}template <class Row> using {self.kernels} = {listed};\n"


def violated(*pairs: str) -> frozenset[tuple[str, str]]:
    return frozenset((rule, subject) for rule, subject in (pair.split("/") for pair in pairs))


PLAIN_K = """
  using SmemLayoutK = cute::Layout<
      cute::Shape<cute::Int<Base::kTileN>, cute::Int<Base::kHeadDim>>,
      cute::Stride<cute::Int<Base::kHeadDim>, cute::_1>>;
"""
PADDED_K = """
  using SmemLayoutK = cute::Layout<
      cute::Shape<cute::Int<Base::kTileN>, cute::Int<Base::kHeadDim>>,
      cute::Stride<cute::Int<Base::kHeadDim + 8>, cute::_1>>;
"""
NARROW_SWIZZLE_Q = """
  using SmemLayoutQ = decltype(cute::tile_to_shape(
      cute::composition(cute::Swizzle<1, 3, 3>{},
                        cute::Layout<cute::Shape<cute::_8, cute::_64>,
                                     cute::Stride<cute::_64, cute::_1>>{}),
      cute::Shape<cute::Int<Base::kTileM>, cute::Int<Base::kHeadDim>>{}));
"""
SPLITTING_SWIZZLE_Q = """
  using SmemLayoutQ = decltype(cute::tile_to_shape(
      cute::composition(cute::Swizzle<3, 2, 4>{},
                        cute::Layout<cute::Shape<cute::_8, cute::_64>,
                                     cute::Stride<cute::_64, cute::_1>>{}),
      cute::Shape<cute::Int<Base::kTileM>, cute::Int<Base::kHeadDim>>{}));
"""
WRONG_ATOM_V = """
  using SmemCopyV = decltype(cute::make_tiled_copy_B(
      cute::Copy_Atom<cute::SM75_U32x4_LDSM_N, Element>{}, typename Base::TiledMma{}));
"""
WRONG_ATOM_K = """
  using SmemCopyK = decltype(cute::make_tiled_copy_B(
      cute::Copy_Atom<cute::SM75_U16x8_LDSM_T, Element>{}, typename Base::TiledMma{}));
"""
# Neighbouring threads copy the vectors of a column of the tile, and not those of a row.
TRANSPOSED_COPY = """
  using GmemCopyQK = decltype(cute::make_tiled_copy(
      cute::Copy_Atom<typename Base::CopyVector, Element>{},
      cute::Layout<cute::Shape<cute::Int<Base::kThreads / 4>, cute::_4>>{},
      cute::Layout<cute::Shape<cute::_1, cute::_8>>{}));
"""
# Half of the threads copy the same elements as the other half.
DOUBLE_COPY = """
  using GmemCopyV = decltype(cute::make_tiled_copy(
      cute::Copy_Atom<typename Base::CopyVector, Element>{},
      cute::Layout<cute::Shape<cute::Shape<cute::_2, cute::Int<Base::kThreads / 16>>, cute::_8>,
                   cute::Stride<cute::Stride<cute::_0, cute::_8>, cute::_1>>{},
      cute::Layout<cute::Shape<cute::_1, cute::_8>>{}));
"""
OVERLAPPING_PLAN = """
  struct SharedMemory {
    cute::array_aligned<Element, cute::cosize_v<typename Base::SmemLayoutQ>, 128> q;
    union {
      cute::array_aligned<Element, cute::cosize_v<typename Base::SmemLayoutK>, 128> k;
      cute::array_aligned<Element, cute::cosize_v<typename Base::SmemLayoutV>, 128> v;
      cute::array_aligned<Element, cute::cosize_v<typename Base::SmemLayoutO>, 128> o;
    };
  };
"""
SHORT_BUFFER = """
  struct SharedMemory {
    union {
      cute::array_aligned<Element, cute::cosize_v<typename Base::SmemLayoutQ>, 128> q;
      cute::array_aligned<Element, cute::cosize_v<typename Base::SmemLayoutO>, 128> o;
    };
    cute::array_aligned<Element, cute::cosize_v<typename Base::SmemLayoutK>, 128> k;
    cute::array_aligned<Element, cute::cosize_v<typename Base::SmemLayoutV> / 2, 128> v;
  };
"""
CROOKED_BUFFER = """
  struct SharedMemory {
    union {
      cute::array_aligned<Element, cute::cosize_v<typename Base::SmemLayoutQ>, 16> q;
      cute::array_aligned<Element, cute::cosize_v<typename Base::SmemLayoutO>, 16> o;
    };
    char flags[16];
    cute::array_aligned<Element, cute::cosize_v<typename Base::SmemLayoutK>, 16> k;
    cute::array_aligned<Element, cute::cosize_v<typename Base::SmemLayoutV>, 16> v;
  };
"""
HUGE_PLAN = """
  struct SharedMemory : Base::SharedMemory {
    char more[128 * 1024];
  };
"""

# The XOR of the addresses is for rows of 64 bytes, but the rows of the swizzle have 128.
NARROW_ROWS_OF_K = """
  using K = sm80::SmemOperand<typename Traits::SmemCopyK, typename Traits::SmemLayoutK, 32, false>;
"""
ADDED_ADDRESSES_OF_V = """
  struct V : Base::V {
    using Base::V::V;
    uint32_t block_address(uint32_t offset) const { return this->first + this->base + offset; }
  };
"""
NARROW_ROWS_OF_O = """
  using PlaceOfO = sm80::SmemAccumulator<
      typename Traits::TiledMma, typename Traits::SmemLayoutO, 32, typename Traits::Element>;
"""

FORWARD = [
    Mutation("swizzle removed", PLAIN_K, violated("banks/k:")),
    Mutation("swizzle of one bit", NARROW_SWIZZLE_Q, violated("banks/q:")),
    Mutation("swizzle that splits vectors", SPLITTING_SWIZZLE_Q, violated("vectors/q:")),
    Mutation("wrong atom for V", WRONG_ATOM_V, violated("vectors/v:", "fragments/O")),
    Mutation("wrong atom for K", WRONG_ATOM_K, violated("fragments/S")),
    Mutation(
        "transposed copy",
        TRANSPOSED_COPY,
        violated("sectors/q:", "sectors/k:", "addresses/k:"),  # the walk takes rows of 64 columns
    ),
    Mutation("vectors copied twice", DOUBLE_COPY, violated("copied once/v:")),
    Mutation("overlapping plan", OVERLAPPING_PLAN, violated("plan/k")),
    Mutation("buffer too short", SHORT_BUFFER, violated("layout/v")),
    Mutation("padding without room for it", PADDED_K, violated("layout/k")),
    Mutation("crooked buffer", CROOKED_BUFFER, violated("alignment/buffers")),
    Mutation("too much shared memory", HUGE_PLAN, violated("plan/shared", "occupancy/compute")),
    Mutation("XOR in narrow rows", "", violated("addresses/k:"), NARROW_ROWS_OF_K),
    Mutation("XOR of O in narrow rows", "", violated("addresses/o:"), NARROW_ROWS_OF_O),
    Mutation("addresses added", "", violated("addresses/v:"), ADDED_ADDRESSES_OF_V),
]


PLAIN_P = """
  using SmemLayoutP = cute::Layout<
      cute::Shape<cute::Int<Base::kTileN>, cute::Int<Base::kTileM>>,
      cute::Stride<cute::Int<Base::kTileM>, cute::_1>>;
"""
# The queries of a warp stand in the order of the MMA, and not together. Then P^T in registers is
# not a block of neighbouring columns, as the next product needs it.
SCATTERED_QUERIES = """
  using TiledMmaS = typename Base::template Mma<Base::kWarpsN, Base::kWarpsM,
                                                cute::Int<16 * Base::kWarpsM>>;
  using SmemCopyK = decltype(cute::make_tiled_copy_A(typename Base::Ldmatrix{}, TiledMmaS{}));
  using SmemCopyQ = decltype(cute::make_tiled_copy_B(typename Base::Ldmatrix{}, TiledMmaS{}));
"""
WRONG_ATOM_KT = """
  using SmemCopyKt = decltype(cute::make_tiled_copy_B(typename Base::Ldmatrix{},
                                                      typename Base::TiledMmaQ{}));
"""
OVERLAPPING_SCORES = """
  template <class Layout>
  using Tile = cute::array_aligned<Element, cute::cosize_v<Layout>, 128>;
  struct SharedMemory {
    Tile<typename Base::SmemLayoutK> k;
    Tile<typename Base::SmemLayoutV> v;
    union {
      Tile<typename Base::SmemLayoutQ> q[Base::kStages];
      Tile<typename Base::SmemLayoutP> grad_s;
    };
    Tile<typename Base::SmemLayoutGradO> grad_o[Base::kStages];
    Tile<typename Base::SmemLayoutP> p;
    float lse[Base::kStages][Base::kTileM];
    float delta[Base::kStages][Base::kTileM];
  };
"""
NUMBER_OF_THE_KEY = """
  using SmemLayoutRow = cute::Layout<
      cute::Shape<cute::Int<Base::kTileN>, cute::Int<Base::kTileM>>,
      cute::Stride<cute::_1, cute::_0>>;
"""
PART_IN_ELEMENTS = """
  static constexpr int part_of_p(int column) { return column * Traits::kTileN * Traits::kPartM; }
"""
OWN_PART_TWICE = """
  static constexpr int column_after(int own, int) { return own; }
"""

BACKWARD = [
    Mutation(
        "swizzle of dS removed", PLAIN_P, violated("banks/p:", "banks/grad_s:", "fragments/dQ")
    ),
    Mutation("scattered queries", SCATTERED_QUERIES, violated("fragments/dV", "fragments/dK")),
    Mutation("wrong atom for K transposed", WRONG_ATOM_KT, violated("fragments/dQ")),
    Mutation("transposed copy of Q and K", TRANSPOSED_COPY, violated("sectors/q:", "sectors/k:")),
    Mutation("Q and dS overlap", OVERLAPPING_SCORES, violated("plan/q")),
    Mutation("LSE of the key", NUMBER_OF_THE_KEY, violated("fragments/lse:", "fragments/delta:")),
    Mutation(
        "part begins too early",
        "",
        violated("addresses/p:", "addresses/grad_s:"),
        PART_IN_ELEMENTS,
    ),
    Mutation("own part twice", "", violated("fragments/dV", "fragments/dK"), OWN_PART_TWICE),
]
