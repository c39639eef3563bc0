#include "attention.h"
#include "products.h"
#include "sampling.h"
