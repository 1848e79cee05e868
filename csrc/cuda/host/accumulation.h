// What accumulate and accumulate_select share on the host.

#pragma once

#include "../../accumulation.h"
#include "../kernels.h"
#include "table.h"

namespace ringprune::cuda {

inline State state_of(const Accumulation& arguments) {
  const bool velocity = arguments.velocity.has_value();
  return {arguments.residual.const_data_ptr<float>(), velocity ? arguments.velocity->const_data_ptr<float>() : nullptr,
          arguments.residual_out.mutable_data_ptr<float>(),
          velocity ? arguments.velocity_out->mutable_data_ptr<float>() : nullptr};
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
