// core/accumulator.h: MMA accumulators seen as rows and columns of scores, and as the A operand of
// the next MMA.
//
// mma.sync m16n8 and WGMMA m64nN give a thread the same pattern: pairs of adjacent columns, in two
// rows that lie eight apart, and four neighbouring threads share a row. Only the nesting of the
// modes differs, and it ends here.
#pragma once

#include <cutlass/numeric_conversion.h>

#include <cute/tensor.hpp>

namespace cute_attention {

// Threads of a warp that hold parts of the same row.
constexpr int kThreadsPerRow = 4;

//   sm80: ((2 cols, 2 rows), MMA_M, MMA_N)     -> ((2, MMA_M), (2, MMA_N))
//   sm90: ((2 cols, 2 rows, V), MMA_M, MMA_N)  -> ((2, MMA_M), (2, V, MMA_N))
template <class AccumulatorLayout>
CUTE_HOST_DEVICE constexpr auto rows_and_columns(AccumulatorLayout const& accumulator) {
  using namespace cute;
  static_assert(decltype(rank(accumulator))::value == 3, "an accumulator is (MMA, MMA_M, MMA_N)");
  auto const rows = make_layout(get<0, 1>(accumulator), get<1>(accumulator));
  if constexpr (decltype(rank<0>(accumulator))::value == 2) {
    return make_layout(rows, make_layout(get<0, 0>(accumulator), get<2>(accumulator)));
  } else {
    return make_layout(
        rows, make_layout(get<0, 0>(accumulator), get<0, 2>(accumulator), get<2>(accumulator)));
  }
}

// The 16-column blocks of an accumulator as the K blocks of a 16-bit A operand from registers.
//   sm80: ((2, 2), MMA_M, MMA_N)     -> ((2, 2, 2), MMA_M, MMA_N / 2)
//   sm90: ((2, 2, V), MMA_M, MMA_N)  -> ((2, 2, 2), MMA_M, (V / 2, MMA_N))
template <class AccumulatorLayout>
CUTE_HOST_DEVICE constexpr auto as_a_operand(AccumulatorLayout const& accumulator) {
  using namespace cute;
  if constexpr (decltype(rank<0>(accumulator))::value == 2) {
    auto const pairs = logical_divide(get<2>(accumulator), Layout<_2>{});  // (2, MMA_N / 2)
    return make_layout(make_layout(get<0, 0>(accumulator), get<0, 1>(accumulator), get<0>(pairs)),
                       get<1>(accumulator), get<1>(pairs));
  } else {
    auto const pairs = logical_divide(get<0, 2>(accumulator), Layout<_2>{});  // (2, V / 2)
    return make_layout(make_layout(get<0, 0>(accumulator), get<0, 1>(accumulator), get<0>(pairs)),
                       get<1>(accumulator), make_layout(get<1>(pairs), get<2>(accumulator)));
  }
}

// A register tensor rounded to Element, same layout.
template <class Element, class Engine, class Layout>
CUTE_HOST_DEVICE auto convert(cute::Tensor<Engine, Layout> const& source) {
  using namespace cute;
  using Source = typename Engine::value_type;
  constexpr int kSize = decltype(size(source))::value;
  auto result = make_fragment_like<Element>(source);
  cutlass::NumericArrayConverter<Element, Source, kSize> const round;
  *reinterpret_cast<cutlass::Array<Element, kSize>*>(result.data()) =
      round(*reinterpret_cast<cutlass::Array<Source, kSize> const*>(source.data()));
  return result;
}

}  // namespace cute_attention
