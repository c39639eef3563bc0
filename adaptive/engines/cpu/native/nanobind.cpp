// The sources of nanobind, compiled into each module.
#include <nb_combined.cpp>
