#include "attention.h"
#include "products.h"
