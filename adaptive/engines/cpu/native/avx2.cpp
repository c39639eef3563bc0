#define ADAPTIVE_MODULE avx2
#include "module.h"
