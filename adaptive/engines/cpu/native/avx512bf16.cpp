#define ADAPTIVE_MODULE avx512bf16
#include "module.h"
