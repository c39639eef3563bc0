#define ADAPTIVE_MODULE avx512vnni
#include "module.h"
