// What accumulate and accumulate_select share on the host.

#pragma once

#include "../../accumulation.h"
#include "../kernels.h"
#include "table.h"

namespace ringprune::cuda {

inline Leaving leaving_of(const Sent& sent, int64_t numel) {
  if (!sent.indices) return {};
  return {{sent.indices->const_data_ptr<int32_t>(), sent.indices->numel(), numel},
          sent.rest ? sent.rest->const_data_ptr<float>() : nullptr,
          sent.masks};
}

inline State state_of(const Accumulation& arguments) {
  const bool velocity = arguments.velocity.has_value();
  return {arguments.residual.const_data_ptr<float>(), velocity ? arguments.velocity->const_data_ptr<float>() : nullptr,
          arguments.residual_out.mutable_data_ptr<float>(),
          velocity ? arguments.velocity_out->mutable_data_ptr<float>() : nullptr,
          leaving_of(arguments.sent, arguments.residual.numel())};
}

inline HostTable<Part> parts_of(const Accumulation& arguments) {
  HostTable<Part> table = parts_of(arguments.grads);
  for (size_t i = 0; i < table.rows.size(); ++i) {
    table.rows[i].factor = static_cast<float>(arguments.factors[i]);
    table.rows[i].momentum = static_cast<float>(arguments.momentum[i]);
    table.rows[i].nesterov = arguments.nesterov.get(i);
  }
  return table;
}

}  // namespace ringprune::cuda
