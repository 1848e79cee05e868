// The host side of all ops in one unit: torch's headers take longer to read than it to compile.

#include "host/accumulate.cpp"
#include "host/accumulate_select.cpp"
#include "host/books.cpp"
#include "host/count_nonfinite.cpp"
#include "host/gather.cpp"
#include "host/give_back.cpp"
#include "host/importance.cpp"
#include "host/put.cpp"
#include "host/select.cpp"
#include "host/share_momentum.cpp"
#include "host/square_sum.cpp"
#include "host/take.cpp"
