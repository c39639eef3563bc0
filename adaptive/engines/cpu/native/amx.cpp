#define ADAPTIVE_MODULE amx
#include "module.h"
