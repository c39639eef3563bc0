// nanobind itself, compiled with each module.
#include <nb_combined.cpp>
