"""Layouts that are broken on purpose: C++ traits that the exporter compiles instead of a kernel's.

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

    def preamble(self, base: str) -> str:
        """The C++ text that defines the broken traits of a family, from its traits `base`."""
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
        return broken


def _violated(*pairs: str) -> frozenset[tuple[str, str]]:
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
      cute::Copy_Atom<typename Base::CpAsync, Element>{},
      cute::Layout<cute::Shape<cute::Int<Base::kThreads / 4>, cute::_4>>{},
      cute::Layout<cute::Shape<cute::_1, cute::_8>>{}));
"""
# Half of the threads copy the same elements as the other half.
DOUBLE_COPY = """
  using GmemCopyV = decltype(cute::make_tiled_copy(
      cute::Copy_Atom<typename Base::CpAsync, Element>{},
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
    Mutation("swizzle removed", PLAIN_K, _violated("banks/k:")),
    Mutation("swizzle of one bit", NARROW_SWIZZLE_Q, _violated("banks/q:")),
    Mutation("swizzle that splits vectors", SPLITTING_SWIZZLE_Q, _violated("vectors/q:")),
    Mutation("wrong atom for V", WRONG_ATOM_V, _violated("vectors/v:", "fragments/O")),
    Mutation("wrong atom for K", WRONG_ATOM_K, _violated("fragments/S")),
    Mutation(
        "transposed copy",
        TRANSPOSED_COPY,
        _violated("sectors/q:", "sectors/k:", "addresses/k:"),  # the walk takes rows of 64 columns
    ),
    Mutation("vectors copied twice", DOUBLE_COPY, _violated("copied once/v:")),
    Mutation("overlapping plan", OVERLAPPING_PLAN, _violated("plan/k")),
    Mutation("buffer too short", SHORT_BUFFER, _violated("layout/v")),
    Mutation("padding without room for it", PADDED_K, _violated("layout/k")),
    Mutation("crooked buffer", CROOKED_BUFFER, _violated("alignment/buffers")),
    Mutation("too much shared memory", HUGE_PLAN, _violated("plan/shared", "occupancy/compute")),
    Mutation("XOR in narrow rows", "", _violated("addresses/k:"), NARROW_ROWS_OF_K),
    Mutation("XOR of O in narrow rows", "", _violated("addresses/o:"), NARROW_ROWS_OF_O),
    Mutation("addresses added", "", _violated("addresses/v:"), ADDED_ADDRESSES_OF_V),
]


# Layouts that WGMMA reads in another way than TMA writes them: with another swizzle, with
# the blocks in another order, or along the wrong axis.
NARROW_SWIZZLE_K = """
  using SmemLayoutK = decltype(cute::tile_to_shape(
      cute::GMMA::Layout_K_SW64_Atom<Element>{},
      cute::Shape<cute::Int<Base::kTileN>, cute::Int<Base::kHeadDim>,
                  cute::Int<Base::kStages>>{}));
"""
BLOCKS_BY_ROW_V = """
  using SmemLayoutV = decltype(cute::tile_to_shape(
      cute::GMMA::Layout_K_SW128_Atom<Element>{},
      cute::Shape<cute::Int<Base::kTileN>, cute::Int<Base::kHeadDimV>, cute::Int<Base::kStages>>{},
      cute::Step<cute::_2, cute::_1, cute::_3>{}));
"""
WRONG_ORDER_VT = """
  using SmemLayoutVt = decltype(cute::tile_to_shape(
      cute::GMMA::Layout_MN_SW128_Atom<Element>{},
      cute::Shape<cute::Int<Base::kHeadDimV>, cute::Int<Base::kTileN>,
                  cute::Int<Base::kStages>>{}));
"""
WRONG_MAJOR_V = """
  using MmaPV = decltype(cute::make_tiled_mma(
      cute::GMMA::rs_op_selector<Element, Element, float,
          cute::Shape<cute::Int<64>, cute::Int<Base::kHeadDimV>, cute::Int<Base::kTileN>>,
          cute::GMMA::Major::K, cute::GMMA::Major::K>()));
  using SmemLayoutVt = decltype(cute::tile_to_shape(
      cute::GMMA::Layout_K_SW128_Atom<Element>{},
      cute::Shape<cute::Int<Base::kHeadDimV>, cute::Int<Base::kTileN>,
                  cute::Int<Base::kStages>>{}));
"""
CROOKED_TMA_BUFFER = """
  struct SharedMemory {
    cute::array_aligned<Element, cute::cosize_v<typename Base::SmemLayoutQ>, 128> q;
    char flags[128];
    cute::array_aligned<Element, cute::cosize_v<typename Base::SmemLayoutK>, 128> k;
    cute::array_aligned<Element, cute::cosize_v<typename Base::SmemLayoutV>, 128> v;
    char tiles[8];
  };
"""
OVERLAPPING_KEYS_AND_VALUES = """
  struct SharedMemory {
    cute::array_aligned<Element, cute::cosize_v<typename Base::SmemLayoutQ>, 1024> q;
    union {
      cute::array_aligned<Element, cute::cosize_v<typename Base::SmemLayoutK>, 1024> k;
      cute::array_aligned<Element, cute::cosize_v<typename Base::SmemLayoutV>, 1024> v;
    };
    char tiles[8];
  };
"""
PLAIN_TMA_K = """
  using SmemLayoutK = decltype(cute::tile_to_shape(
      cute::GMMA::Layout_K_INTER_Atom<Element>{},
      cute::Shape<cute::Int<Base::kTileN>, cute::Int<Base::kHeadDim>,
                  cute::Int<Base::kStages>>{}));
"""

HOPPER_FORWARD = [
    Mutation(
        "narrower swizzle than TMA",
        NARROW_SWIZZLE_K,
        _violated("copied once/k:", "swizzle/k:", "fragments/S"),
    ),
    Mutation("blocks in another order than boxes", BLOCKS_BY_ROW_V, _violated("copied once/v:")),
    Mutation("transpose in the wrong order", WRONG_ORDER_VT, _violated("fragments/O")),
    Mutation("wrong major", WRONG_MAJOR_V, _violated("fragments/O")),
    Mutation("crooked buffer for TMA", CROOKED_TMA_BUFFER, _violated("alignment/buffers")),
    Mutation("overlapping plan of sm90", OVERLAPPING_KEYS_AND_VALUES, _violated("plan/k")),
    Mutation(
        "swizzle of sm90 removed",
        PLAIN_TMA_K,
        _violated("copied once/k:", "swizzle/k:", "fragments/S"),
    ),
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
        "swizzle of dS removed", PLAIN_P, _violated("banks/p:", "banks/grad_s:", "fragments/dQ")
    ),
    Mutation("scattered queries", SCATTERED_QUERIES, _violated("fragments/dV", "fragments/dK")),
    Mutation("wrong atom for K transposed", WRONG_ATOM_KT, _violated("fragments/dQ")),
    Mutation("transposed copy of Q and K", TRANSPOSED_COPY, _violated("sectors/q:", "sectors/k:")),
    Mutation("Q and dS overlap", OVERLAPPING_SCORES, _violated("plan/q")),
    Mutation("LSE of the key", NUMBER_OF_THE_KEY, _violated("fragments/lse:", "fragments/delta:")),
    Mutation(
        "part begins too early",
        "",
        _violated("addresses/p:", "addresses/grad_s:"),
        PART_IN_ELEMENTS,
    ),
    Mutation("own part twice", "", _violated("fragments/dV", "fragments/dK"), OWN_PART_TWICE),
]


# Only one of the two views of dS lacks the swizzle, or has another one.
PLAIN_DS = """
  using SmemLayoutSt = cute::Layout<
      cute::Shape<cute::Int<Base::kTileN>, cute::Int<Base::kTileM>, cute::Int<Base::kStagesS>>,
      cute::Stride<cute::Int<Base::kTileM>, cute::_1, cute::Int<Base::kTileN * Base::kTileM>>>;
"""
NARROW_SWIZZLE_DS = """
  using SmemLayoutSt = decltype(cute::tile_to_shape(
      cute::GMMA::Layout_K_SW64_Atom<Element>{},
      cute::Shape<cute::Int<Base::kTileN>, cute::Int<Base::kTileM>,
                  cute::Int<Base::kStagesS>>{}));
"""
WRONG_ATOM_DS = """
  using SmemCopyS = decltype(cute::make_tiled_copy_C(
      cute::Copy_Atom<cute::SM90_U16x8_STSM_T, Element>{}, typename Base::MmaS{}));
"""
WRONG_ORDER_QT = """
  using SmemLayoutQt = decltype(cute::tile_to_shape(
      cute::GMMA::Layout_MN_SW128_Atom<Element>{},
      cute::Shape<cute::Int<Base::kHeadDim>, cute::Int<Base::kTileM>,
                  cute::Int<Base::kStages>>{}));
"""
SAME_PART_OF_DQ = """
  static constexpr int col_part_q(int) { return 0; }
"""
_HOPPER_BUFFERS = """
  template <class Layout>
  using Tile = cute::array_aligned<Element, cute::cosize_v<Layout>, 1024>;
  struct SharedMemory {
    Tile<typename Base::SmemLayoutK> k;
    Tile<typename Base::SmemLayoutV> v;
%s
    Tile<typename Base::SmemLayoutGradO> grad_o;
    alignas(128) float grad_q[%s][sm90::kWarpgroupM * Base::kColsQ];
    float lse[Base::kStages][Base::kTileM];
    float delta[Base::kStages][Base::kTileM];
  };
"""
ONE_BUFFER_OF_DQ = _HOPPER_BUFFERS % (
    """
    Tile<typename Base::SmemLayoutQ> q;
    Tile<typename Base::SmemLayoutSt> grad_s;
""",
    "1",
)
OVERLAPPING_Q_AND_DS = _HOPPER_BUFFERS % (
    """
    union {
      Tile<typename Base::SmemLayoutQ> q;
      Tile<typename Base::SmemLayoutSt> grad_s;
    };
""",
    "Base::kConsumers",
)

HOPPER_BACKWARD = [
    Mutation(
        "swizzle of dS removed where it is written",
        PLAIN_DS,
        _violated("banks/grad_s:", "fragments/dQ"),
    ),
    Mutation("narrower swizzle of dS", NARROW_SWIZZLE_DS, _violated("fragments/dQ")),
    Mutation("wrong atom for dS", WRONG_ATOM_DS, _violated("vectors/grad_s:", "fragments/dQ")),
    Mutation("transpose of Q in the wrong order", WRONG_ORDER_QT, _violated("fragments/dK")),
    Mutation(
        "two warpgroups with the same part of dQ",
        SAME_PART_OF_DQ,
        _violated("fragments/dQ", "copied once/grad_q:"),
    ),
    Mutation("one buffer for all of dQ", ONE_BUFFER_OF_DQ, _violated("copied once/grad_q:")),
    Mutation("Q and dS of sm90 overlap", OVERLAPPING_Q_AND_DS, _violated("plan/q")),
    Mutation(
        "LSE of the key of sm90",
        NUMBER_OF_THE_KEY,
        _violated("fragments/lse:", "fragments/delta:"),
    ),
]
