#define ADAPTIVE_MODULE neon
#include "module.h"
