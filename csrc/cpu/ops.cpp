// All ops in one unit: torch's headers take longer to read than the ops to compile.

#include "ops/accumulate.cpp"
#include "ops/accumulate_select.cpp"
#include "ops/books.cpp"
#include "ops/count_nonfinite.cpp"
#include "ops/gather.cpp"
#include "ops/give_back.cpp"
#include "ops/importance.cpp"
#include "ops/put.cpp"
#include "ops/select.cpp"
#include "ops/share_momentum.cpp"
#include "ops/square_sum.cpp"
#include "ops/take.cpp"
