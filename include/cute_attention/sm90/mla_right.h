// sm90/mla_right.h: the consumer warpgroup that computes the right half of O, with the P of the
// other one (mla_left.h).
#pragma once

#include "cute_attention/sm90/mla_half.h"

namespace cute_attention::sm90 {

template <class Row>
struct MlaRight : MlaHalf<Row, kRight, MlaRight<Row>> {
  using Base = MlaHalf<Row, kRight, MlaRight>;
  using Base::arguments, Base::Base, Base::channel, Base::ring, Base::tOrO, Base::tOrP;
  using typename Base::Rows;

  CUTE_DEVICE void compute(ForwardTile const& tile) {
    if (!tile.sees_keys()) {
      return;
    }
    cute::clear(tOrO);
    for (int32_t count = tile.kv.end - tile.kv.begin; count > 0; --count) {
      step();
    }
    SoftmaxEnd<Rows> end{};
    end.is_split = has_splits(arguments.params);
    channel.receive(end.factors);
    this->store(tile, end);
  }

 private:
  CUTE_DEVICE void step() {
    Rows factors;
    channel.receive(tOrP, factors);
    if (__any_sync(0xffffffffu, factors(0) != 1.f || factors(1) != 1.f)) {
      auto rO = this->output();
      scale_rows(rO, factors);
    }
    this->wait_for(kRight);
    this->start_output();
    cute::warpgroup_wait<0>();
    this->release_output(ring);
    ring.advance();
  }
};

}  // namespace cute_attention::sm90
