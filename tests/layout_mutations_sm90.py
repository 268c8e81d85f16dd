"""Layouts of the sm90 kernels that are broken on purpose (layout_mutations.py)."""

from __future__ import annotations

from layout_mutations import NUMBER_OF_THE_KEY, Mutation, violated

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
    cute::array_aligned<Element, cute::cosize_v<typename Base::SmemLayoutO>, 128> o;
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
    cute::array_aligned<Element, cute::cosize_v<typename Base::SmemLayoutO>, 1024> o;
    char tiles[8];
  };
"""
PLAIN_TMA_K = """
  using SmemLayoutK = decltype(cute::tile_to_shape(
      cute::GMMA::Layout_K_INTER_Atom<Element>{},
      cute::Shape<cute::Int<Base::kTileN>, cute::Int<Base::kHeadDim>,
                  cute::Int<Base::kStages>>{}));
"""
NARROW_SWIZZLE_O = """
  using SmemLayoutO = decltype(cute::tile_to_shape(
      cute::GMMA::Layout_K_SW64_Atom<Element>{},
      cute::Shape<cute::Int<64>, cute::Int<Base::kHeadDimV>, cute::Int<Base::kConsumers>>{}));
"""

HOPPER_FORWARD = [
    Mutation(
        "narrower swizzle than TMA",
        NARROW_SWIZZLE_K,
        violated("copied once/k:", "swizzle/k:", "fragments/S"),
    ),
    Mutation("blocks in another order than boxes", BLOCKS_BY_ROW_V, violated("copied once/v:")),
    Mutation("transpose in the wrong order", WRONG_ORDER_VT, violated("fragments/O")),
    Mutation("wrong major", WRONG_MAJOR_V, violated("fragments/O")),
    Mutation("crooked buffer for TMA", CROOKED_TMA_BUFFER, violated("alignment/buffers")),
    Mutation("overlapping plan of sm90", OVERLAPPING_KEYS_AND_VALUES, violated("plan/k")),
    Mutation(
        "swizzle of sm90 removed",
        PLAIN_TMA_K,
        violated("copied once/k:", "swizzle/k:", "fragments/S"),
    ),
]
# Of rows whose O leaves by TMA.
HOPPER_OUTPUT = [
    Mutation(
        "narrower swizzle of O than TMA",
        NARROW_SWIZZLE_O,
        violated("copied once/o:", "swizzle/o:"),
    ),
]

# The parts of a tile, with qv: one in the place of another, and read in another order.
LEFT_HALF_TWICE = """
  static constexpr int offset_kv(int stage, int part) {
    return Base::offset_kv(stage, part == sm90::kRight ? sm90::kLeft : part);
  }
"""
PARTS_OF_Q_OUT_OF_ORDER = """
  static constexpr int offset_q(sm90::Part part) {
    return Base::kTileM * (part == sm90::kRope ? 0 : Base::col(part) + Base::kHeadDim);
  }
"""
WRONG_ORDER_HALF = """
  using SmemLayoutVt = decltype(cute::tile_to_shape(
      cute::GMMA::Layout_MN_SW128_Atom<Element>{},
      cute::Shape<cute::Int<Base::kHalf>, cute::Int<Base::kTileN>, cute::_1>{}));
"""

HOPPER_MLA = [
    Mutation("left half twice", LEFT_HALF_TWICE, violated("fragments/S", "fragments/O")),
    Mutation("parts of q out of order", PARTS_OF_Q_OUT_OF_ORDER, violated("fragments/S")),
    Mutation("half in the wrong order", WRONG_ORDER_HALF, violated("fragments/O")),
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

# As many as an SM has, and more than a CTA of 384 threads has at launch.
ALL_REGISTERS_OF_AN_SM = """
  struct Registers : Base::Registers {
    static constexpr int kProducer = 32;
    static_assert(kProducer + 2 * Registers::kConsumer == 65536 / sm90::kWarpgroupThreads);
  };
"""
HOPPER_BACKWARD = [
    Mutation(
        "swizzle of dS removed where it is written",
        PLAIN_DS,
        violated("banks/grad_s:", "fragments/dQ"),
    ),
    Mutation("narrower swizzle of dS", NARROW_SWIZZLE_DS, violated("fragments/dQ")),
    Mutation("wrong atom for dS", WRONG_ATOM_DS, violated("vectors/grad_s:", "fragments/dQ")),
    Mutation("transpose of Q in the wrong order", WRONG_ORDER_QT, violated("fragments/dK")),
    Mutation(
        "two warpgroups with the same part of dQ",
        SAME_PART_OF_DQ,
        violated("fragments/dQ", "copied once/grad_q:"),
    ),
    Mutation("one buffer for all of dQ", ONE_BUFFER_OF_DQ, violated("copied once/grad_q:")),
    Mutation("Q and dS of sm90 overlap", OVERLAPPING_Q_AND_DS, violated("plan/q")),
    Mutation(
        "LSE of the key of sm90",
        NUMBER_OF_THE_KEY,
        violated("fragments/lse:", "fragments/delta:"),
    ),
    Mutation("all registers of an SM", ALL_REGISTERS_OF_AN_SM, violated("registers/all")),
]


# The kernel for dK and dV. What it shares with the kernel that computes all gradients is described
# once, and broken once, above.
FACTORS_BY_THREAD = """
  static constexpr int factor_vector(int v, int thread) {
    return thread * (Base::kTileM * Base::kTileN / sm90::kWarpgroupThreads / 4) + v;
  }
"""
FACTORS_OVER_EACH_OTHER = """
  static constexpr int factor_vector(int v, int thread) {
    return v * (sm90::kWarpgroupThreads / 2) + thread;
  }
"""
# The blocks of 16 queries of dP stand in another order than those of S.
DP_IN_ANOTHER_ORDER = """
  using MmaP = decltype(cute::make_tiled_mma(
      cute::GMMA::ss_op_selector<Element, Element, float,
          cute::Shape<cute::Int<Base::kTileN>, cute::_16, cute::Int<Base::kHeadDimV>>>(),
      cute::Layout<cute::Shape<cute::_1, cute::_1, cute::_1>>{},
      cute::Tile<cute::_64,
                 cute::Layout<cute::Shape<cute::_16, cute::_2, cute::_2>,
                              cute::Stride<cute::_1, cute::_32, cute::_16>>,
                 cute::_16>{}));
"""
WRONG_ORDER_GRAD_OT = """
  using SmemLayoutGradOt = decltype(cute::tile_to_shape(
      cute::GMMA::Layout_MN_SW128_Atom<Element>{},
      cute::Shape<cute::Int<Base::kHeadDimV>, cute::Int<Base::kTileM>,
                  cute::Int<Base::kStages>>{}));
"""
PLAIN_V = """
  using SmemLayoutV = decltype(cute::tile_to_shape(
      cute::GMMA::Layout_K_INTER_Atom<Element>{},
      cute::Shape<cute::Int<Base::kTileN>, cute::Int<Base::kHeadDimV>, cute::_1>{}));
"""
_GRAD_KV_BUFFERS = """
  template <class Layout>
  using Tile = cute::array_aligned<Element, cute::cosize_v<Layout>, 1024>;
  struct SharedMemory {
    Tile<typename Base::SmemLayoutK> k;
    Tile<typename Base::SmemLayoutV> v;
    Tile<typename Base::SmemLayoutGradO> grad_o;
%s
    float lse[Base::kStages][Base::kTileM];
    float delta[Base::kStages][Base::kTileM];
  };
"""
HALF_A_BUFFER_OF_FACTORS = (
    _GRAD_KV_BUFFERS
    % """
    Tile<typename Base::SmemLayoutQ> q;
    alignas(128) float factor[Base::kStagesFactor][Base::kTileN * Base::kTileM / 2];
"""
)
FACTORS_OVER_Q = (
    _GRAD_KV_BUFFERS
    % """
    union {
      Tile<typename Base::SmemLayoutQ> q;
      alignas(128) float factor[Base::kStagesFactor][Base::kTileN * Base::kTileM];
    };
"""
)
CROOKED_FACTORS = (
    _GRAD_KV_BUFFERS
    % """
    Tile<typename Base::SmemLayoutQ> q;
    char flags[8];
    float factor[Base::kStagesFactor][Base::kTileN * Base::kTileM];
"""
)

HOPPER_GRAD_KV = [
    Mutation("factors side by side", FACTORS_BY_THREAD, violated("banks/factor:")),
    Mutation(
        "factors over each other",
        FACTORS_OVER_EACH_OTHER,
        violated("copied once/factor:", "fragments/factor:"),
    ),
    Mutation(
        "dP in another order than S",
        DP_IN_ANOTHER_ORDER,
        violated("fragments/factor:", "fragments/delta:", "fragments/dK"),
    ),
    Mutation("transpose of dO in the wrong order", WRONG_ORDER_GRAD_OT, violated("fragments/dV")),
    Mutation(
        "swizzle of V removed", PLAIN_V, violated("copied once/v:", "swizzle/v:", "fragments/dP^T")
    ),
    Mutation("half a buffer of factors", HALF_A_BUFFER_OF_FACTORS, violated("copied once/factor:")),
    Mutation("factors over Q", FACTORS_OVER_Q, violated("plan/q")),
    Mutation("crooked factors", CROOKED_FACTORS, violated("alignment/buffers")),
]


# The kernel for dQ.
BLOCKS_BY_ROW_Q = """
  using SmemLayoutQ = decltype(cute::tile_to_shape(
      cute::GMMA::Layout_K_SW128_Atom<Element>{},
      cute::Shape<cute::_64, cute::Int<Base::kHeadDim>, cute::Int<Base::kConsumers>>{},
      cute::Step<cute::_2, cute::_1, cute::_3>{}));
"""
WRONG_ORDER_KT = """
  using SmemLayoutKt = decltype(cute::tile_to_shape(
      cute::GMMA::Layout_MN_SW128_Atom<Element>{},
      cute::Shape<cute::Int<Base::kHeadDim>, cute::Int<Base::kTileN>,
                  cute::Int<Base::kStagesK>>{}));
"""
# Both warpgroups have the first 64 rows of dO.
SAME_ROWS_OF_GRAD_O = """
  using OneTile = decltype(cute::tile_to_shape(
      cute::GMMA::Layout_K_SW128_Atom<Element>{},
      cute::Shape<cute::_64, cute::Int<Base::kHeadDimV>, cute::_1>{}));
  using SmemLayoutGradO = cute::ComposedLayout<
      decltype(OneTile{}.layout_a()), decltype(OneTile{}.offset()),
      decltype(cute::make_layout(cute::get<0>(OneTile{}.layout_b()),
                                 cute::get<1>(OneTile{}.layout_b()),
                                 cute::Layout<cute::Int<Base::kConsumers>, cute::_0>{}))>;
"""
K_OVER_V = """
  template <class Layout>
  using Tile = cute::array_aligned<Element, cute::cosize_v<Layout>, 1024>;
  struct SharedMemory {
    Tile<typename Base::SmemLayoutQ> q;
    Tile<typename Base::SmemLayoutGradO> grad_o;
    union {
      Tile<typename Base::SmemLayoutK> k;
      Tile<typename Base::SmemLayoutV> v;
    };
  };
"""

HOPPER_GRAD_Q = [
    Mutation(
        "blocks of Q in another order than boxes",
        BLOCKS_BY_ROW_Q,
        violated("copied once/q:", "fragments/S"),
    ),
    Mutation("transpose of K in the wrong order", WRONG_ORDER_KT, violated("fragments/dQ")),
    Mutation(
        "two warpgroups with the same rows of dO",
        SAME_ROWS_OF_GRAD_O,
        violated("layout/grad_o", "copied once/grad_o:", "fragments/dP"),
    ),
    Mutation("K over V", K_OVER_V, violated("plan/k")),
]
