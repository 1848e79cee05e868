// share_momentum on CUDA, the host side: two launches, the upload of the table included.

#include <torch/library.h>

#include "../../shared_momentum.h"
#include "../kernels.h"
#include "table.h"

namespace ringprune::cuda {
namespace {

void pass(const SharedMomentum& given, at::IntArrayRef) {
  const Session session(given.averages[0]);
  HostTable<Sharing> table(given.averages.size());
  table.lay_out([&](size_t i) { return given.averages[i].numel(); });
  for (size_t i = 0; i < given.averages.size(); ++i) {
    Sharing& row = table.rows[i];
    row.average = given.averages[i].const_data_ptr<float>();
    row.elapsed = given.elapsed[i].mutable_data_ptr<float>();
    row.momentum = given.momenta[i].mutable_data_ptr();
    row.momentum_type = type_of(given.momenta[i]);
    row.pace = given.pace(i);
    row.weight = given.weights[i].const_data_ptr<float>();
    row.own = given.owns[i].const_data_ptr<float>();
    if (!given.is_adam()) continue;
    row.square = given.squares[i].const_data_ptr();
    row.square_type = type_of(given.squares[i]);
  }
  at::Tensor rows;
  launch_share_momentum(session.stream(), table.send(session, rows), given.is_adam());
}

}  // namespace

TORCH_LIBRARY_IMPL(ringprune, CUDA, m) { m.impl("share_momentum", share_momentum<pass>); }

}  // namespace ringprune::cuda
