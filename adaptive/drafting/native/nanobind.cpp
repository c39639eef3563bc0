// nanobind itself.
#include <nb_combined.cpp>
