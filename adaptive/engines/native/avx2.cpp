#include "decoder.h"
#include "sampling.h"
