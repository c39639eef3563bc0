#define ADAPTIVE_MODULE neondot
#include "module.h"
