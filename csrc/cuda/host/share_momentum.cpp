// share_momentum on CUDA, the host side: two launches, the upload of the table included.

#include <torch/library.h>

#include "../../shared_momentum.h"
#include "../kernels.h"
#include "table.h"

namespace ringprune::cuda {
namespace {

void share_momentum(at::TensorList averages, at::TensorList elapsed, at::TensorList momenta, at::TensorList weights,
                    at::TensorList owns, at::ArrayRef<double> intervals, at::ArrayRef<double> times,
                    at::ArrayRef<double> keeps, const c10::List<bool>& whole, at::TensorList squares,
                    at::ArrayRef<double> decays, at::ArrayRef<double> roots, at::ArrayRef<double> epsilons,
                    at::ArrayRef<double> factors) {
  const SharedMomentum given{averages, elapsed, momenta, weights, owns,  intervals, times,
                             keeps,    whole,   squares, decays,  roots, epsilons,  factors};
  given.check();
  const Session session(averages[0]);
  HostTable<Sharing> table(averages.size());
  table.lay_out([&](size_t i) { return averages[i].numel(); });
  for (size_t i = 0; i < averages.size(); ++i) {
    Sharing& row = table.rows[i];
    row.average = averages[i].const_data_ptr<float>();
    row.elapsed = elapsed[i].mutable_data_ptr<float>();
    row.momentum = momenta[i].mutable_data_ptr();
    row.momentum_type = type_of(momenta[i]);
    row.pace = given.pace(i);
    row.weight = weights[i].const_data_ptr<float>();
    row.own = owns[i].const_data_ptr<float>();
    if (!given.is_adam()) continue;
    row.square = squares[i].const_data_ptr();
    row.square_type = type_of(squares[i]);
  }
  at::Tensor rows;
  launch_share_momentum(session.stream(), table.send(session, rows), given.is_adam());
  given.mark();
}

}  // namespace

TORCH_LIBRARY_IMPL(ringprune, CUDA, m) { m.impl("share_momentum", share_momentum); }

}  // namespace ringprune::cuda
