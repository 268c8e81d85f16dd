// sm90_grad_kv.h: describes the layouts of the sm90 kernel that computes dK and dV where another
// kernel computes dQ. It takes them from the traits, and pairs copies and layouts as the kernel
// does.
#pragma once

#include "layouts/sm90_key_gradients.h"

#include "cute_attention/sm90/grad_kv_traits.h"

namespace cute_attention::layouts {

template <class Traits>
struct Sm90GradKv : Sm90KeyGradients<Traits, typename Traits::MmaP> {
  static constexpr char const* kName = "grad_kv";
  using Base = Sm90KeyGradients<Traits, typename Traits::MmaP>;
  using typename Base::Scores;
  using SharedMemory = typename Traits::SharedMemory;

  static Json plan() {
    static SharedMemory const plan{};
    return Json::object()
        .set("phases", json_array({"all steps"}))
        .set("bytes", int(sizeof(SharedMemory)))
        .set("buffers",
             Json::array()
                 .add(buffer_json("k", plan, plan.k, Base::kAlignmentK, 0, 0))
                 .add(buffer_json("v", plan, plan.v, Base::kAlignmentV, 0, 0))
                 .add(buffer_json("q", plan, plan.q, Base::kAlignmentQ, 0, 0))
                 .add(buffer_json("grad_o", plan, plan.grad_o, Base::kAlignmentGradO, 0, 0))
                 .add(buffer_json("factor", plan, plan.factor, kBytesOfVector, 0, 0))
                 .add(buffer_json("lse", plan, plan.lse, Base::kAlignmentRow, 0, 0))
                 .add(buffer_json("delta", plan, plan.delta, Base::kAlignmentRow, 0, 0)));
  }

  static Json copies() { return Base::inputs().add(factors_json()); }

  // What dP + delta is multiplied with. A thread of the warpgroup of dV writes the factors of its
  // scores in vectors of four, and the same thread of the warpgroup of dK reads the same vectors.
  // For each thread it says which vector of a buffer each vector of its accumulator is.
  static Json factors_json() {
    Json vectors = Json::array();
    for (int thread = 0; thread < sm90::kWarpgroupThreads; ++thread) {
      Json own = Json::array();
      for (int v = 0; v < cute::size_v<Scores> / kNumbersOfVector; ++v) {
        own.add(Traits::factor_vector(v, thread));
      }
      vectors.add(own);
    }
    return Json::object()
        .set("kind", "handed")
        .set("tensor", "factor")
        .set("accumulator", "S")
        .set("reader", "dP")
        .set("numbers", kNumbersOfVector)
        .set("stages", Traits::kStagesFactor)
        .set("vectors", vectors);
  }

  static Json products() { return Base::score_and_key_products(); }

  // Each of the two warpgroups starts the scores of a step while the gradient of the step before is
  // under way, whose operand is in registers.
  static Json roles() {
    auto const role = [](char const* name, char const* scores, char const* gradient) {
      return role_json(name, sm90::kWarpgroupThreads, Traits::Registers::kConsumer, true,
                       json_array({json_array({scores, gradient})}));
    };
    return Json::array()
        .add(producer_role_json<Traits>("load", 32))
        .add(producer_role_json<Traits>("idle", sm90::kWarpgroupThreads - 32))
        .add(role("consumer of dV", "S", "dV"))
        .add(role("consumer of dK", "dP", "dK"));
  }

  static constexpr int kNumbersOfVector = 4;
  static constexpr int kBytesOfVector = kNumbersOfVector * int(sizeof(float));
};

}  // namespace cute_attention::layouts
