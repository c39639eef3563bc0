#include "draft.h"
#include "verify.h"
